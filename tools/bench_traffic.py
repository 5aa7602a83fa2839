"""Random arrivals over HTTP with default flags, on one GPU: the shape of Llama-3.1-8B with random weights.

Run by `python -m tools.bench_traffic [loads] [--system=ours|vllm|both] [--save=DIR]` from the root: starts
the server, runs `hex-llm bench serve` for each load, and prints a row of milliseconds for each. Both: each
has SHARE of the GPU's memory, and the loads go to them by turns (`hex-llm bench compare`). --serve adds flags
of the server. vLLM's site-packages, where they are not installed, are named by --path. --clients: afterwards
our client and vLLM's own measure our server. --tiny: a small model, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

from tools.bench_gpu_http import write_tokenizer
from tools.gpu_common import ROOT, started, write_model

LOG = "log"  # of the server, in its model's folder
PERCENTILES = ("p50", "p90", "p99")


class Load(NamedTuple):
    dataset: str
    rate: float  # requests a second
    seconds: float


LOADS = {
    "chat12": Load("chat", 12, 25),
    "chat30": Load("chat", 30, 25),
    "chat60": Load("chat", 60, 20),
    "rag8": Load("rag", 8, 25),
    "turns20": Load("multi-turn", 20, 25),
    "mixture20": Load("mixture", 20, 25),
} | {f"curve{rate}": Load("chat", rate, 15) for rate in range(10, 90, 10)}
STANDARD = [name for name in LOADS if not name.startswith("curve")]
FIRST_S = 20  # until the first of two servers has its memory
SHARE = 0.45  # of the GPU's memory for each of two; more than any of these loads fills


def command(system: str, port: int, options: argparse.Namespace, model: Path) -> list[str]:
    fixed = [f"--port={port}", "--host=127.0.0.1", "--max-model-len=8192", "--served-model-name=m"]
    if system == "vllm":
        server = ["-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--load-format=dummy"]
        server += [f"--gpu-memory-utilization={SHARE}"] if options.system == "both" else []
    else:
        server = ["-m", "hex_llm.cli", "serve", str(model), "--load_format=dummy", "--disable_log_requests"]
        server += [f"--download_dir={options.cache}"] if options.cache else []
    return [sys.executable, *server, *fixed, *options.serve]


def server(system: str, port: int, options: argparse.Namespace, model: Path) -> AbstractContextManager[str]:
    """Its address, once it answers."""
    url = f"http://127.0.0.1:{port}"
    own = options.path if system == "vllm" else ""
    environ = {"PYTHONPATH": own or os.environ.get("PYTHONPATH", ""), "HF_HUB_OFFLINE": "1"}
    environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it is not there
    if options.system == "both":
        environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(SHARE)
    line = command(system, port, options, model)
    return started(line, model / f"{LOG}-{system}", lambda: is_ready(url) and url, environ)


def is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def flags_of(load: Load, seed: int, scale: float) -> list[str]:
    flags = ["--backend=vllm", "--model=m", f"--dataset-name={load.dataset}", f"--request-rate={load.rate}"]
    flags += [f"--num-prompts={round(load.rate * load.seconds)}", "--ignore-eos", "--temperature=0"]
    flags += ["--metric-percentiles=50,90,99", "--percentile-metrics=ttft,tpot,itl"]
    return [*flags, f"--seed={seed}", f"--length-scale={scale}"]


def bench(words: list[str], *flags: str) -> bool:
    """Whether it could be run; if not, its output is shown."""
    line = [sys.executable, "-m", "hex_llm.cli", "bench", *words, *flags]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{line}: {done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
    elif words[0] == "compare":
        print(done.stdout, flush=True)
    return not done.returncode


def run(url: str, name: str, options: argparse.Namespace) -> None:
    file = f"{options.system}-{name}.json"
    flags = flags_of(LOADS[name], options.seed, options.scale)
    saved = ["--save-result", f"--result-dir={options.save}", f"--result-filename={file}"]
    if not bench(["serve"], f"--base-url={url}", *flags, *saved):
        return
    found = json.loads((Path(options.save) / file).read_text())
    times = [
        " / ".join(f"{found[f'{p}_{metric}_ms']:.1f}" for p in PERCENTILES)
        for metric in ("ttft", "tpot", "itl")
    ]
    rates = f"{found['output_throughput']:.0f} tok/s, {found['failed']} failed"
    print(f"{options.system} {name}: {rates} | " + " | ".join(times), flush=True)
    if "server" in found:
        print(f"    {found['server']}", flush=True)


def run_both(urls: list[str], names: list[str], options: argparse.Namespace) -> None:
    """vLLM is A, we are B."""
    for i, name in enumerate(names):
        print(f"== {name}", flush=True)
        flags = flags_of(LOADS[name], options.seed + i, options.scale)
        bench(["compare", *urls], f"--rounds={options.rounds}", *flags)


def run_clients(url: str, model: Path, options: argparse.Namespace) -> None:
    """Random prompts of 400 tokens and answers of 200, 20 a second, by our client, vLLM's, and again."""
    lengths = ["--random-input-len=400", "--random-output-len=200", "--dataset-name=random", "--ignore-eos"]
    rate = ["--request-rate=20", "--num-prompts=300", "--seed=1", "--temperature=0"]
    metrics = ["--percentile-metrics=ttft,tpot,itl,e2el", "--metric-percentiles=50,90,99"]
    flags = [f"--base-url={url}", "--backend=vllm", "--model=m", *lengths, *rate, *metrics]
    flags += ["--disable-tqdm"]
    ours = [sys.executable, "-m", "hex_llm.cli", "bench", "serve"]
    theirs = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", f"--tokenizer={model}"]
    for name, line in [("ours", ours), ("vLLM's", theirs)] * 2:
        path = options.path if line is theirs else os.environ.get("PYTHONPATH", "")
        told, full = {**os.environ, "PYTHONPATH": path}, [*line, *flags]
        done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, env=told, check=False)
        print(f"== {name} client\n{done.stdout[-3000:]}", flush=True)
        if done.returncode:
            print(done.stderr[-1500:], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loads", nargs="*", help=", ".join(LOADS))
    parser.add_argument("--system", default="ours", choices=("ours", "vllm", "both"))
    parser.add_argument("--serve", action="append", default=[], help="a flag of the server")
    parser.add_argument("--path", default="")
    parser.add_argument("--cache", help="a folder that keeps what was compiled")
    parser.add_argument("--port", type=int, default=7099, help="and, of the second server, the next")
    parser.add_argument("--save", default=".")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="of both")
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths")
    parser.add_argument("--clients", action="store_true")
    parser.add_argument(
        "--log", type=int, default=0, help="characters of the server's log to show at its end"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.clients and options.system == "vllm":
        parser.error("--clients measure our server")
    names = options.loads or STANDARD
    systems = ["ours", "vllm"] if options.system == "both" else [options.system]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads, ExitStack() as stack:
        model = Path(folder) / "model"
        write_model(model, options.tiny)
        write_tokenizer(model)
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        servers = [server(system, options.port + i, options, model) for i, system in enumerate(systems)]
        entered = []
        for one in servers:  # the second starts when the first has taken its memory
            entered.append(threads.submit(stack.enter_context, one))
            time.sleep(FIRST_S if len(servers) > 1 else 0)
        urls = dict(zip(systems, [one.result() for one in entered], strict=True))
        if options.system == "both":
            run_both([urls["vllm"], urls["ours"]], names, options)
        else:
            for name in names:
                run(urls[options.system], name, options)
        if options.clients:
            run_clients(urls["ours"], model, options)
        for system in systems if options.log else []:
            print((model / f"{LOG}-{system}").read_text()[-options.log :])


if __name__ == "__main__":
    main()
