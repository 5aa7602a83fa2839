"""Random arrivals over HTTP with default flags, on one GPU: the shape of Llama-3.1-8B with random weights.

Run by `python -m tools.bench_traffic [loads] [--system=ours|vllm] [--save=DIR]` from the root: starts the
server, runs `hex-llm bench serve` for each load, and prints a row of milliseconds for each. --serve adds
flags of the server. vLLM's site-packages, where they are not installed, are named by --path. --tiny: a small
model, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import AbstractContextManager
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
}


def command(options: argparse.Namespace, model: Path) -> list[str]:
    fixed = [f"--port={options.port}", "--host=127.0.0.1", "--max-model-len=8192", "--served-model-name=m"]
    if options.system == "vllm":
        server = ["-m", "vllm.entrypoints.openai.api_server", f"--model={model}", "--load-format=dummy"]
    else:
        server = ["-m", "hex_llm.cli", "serve", str(model), "--load_format=dummy", "--disable_log_requests"]
        server += [f"--download_dir={options.cache}"] if options.cache else []
    return [sys.executable, *server, *fixed, *options.serve]


def server(options: argparse.Namespace, model: Path) -> AbstractContextManager[str]:
    """Its address, once it answers."""
    url = f"http://127.0.0.1:{options.port}"
    path = options.path or os.environ.get("PYTHONPATH", "")
    environ = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # it is not there
    return started(command(options, model), model / LOG, lambda: is_ready(url) and url, environ)


def is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except OSError:
        return False


def run(url: str, name: str, load: Load, options: argparse.Namespace) -> None:
    file = f"{options.system}-{name}.json"
    flags = ["--backend=vllm", f"--base-url={url}", "--model=m", f"--dataset-name={load.dataset}"]
    flags += [
        f"--request-rate={load.rate}",
        f"--num-prompts={round(load.rate * load.seconds)}",
        "--ignore-eos",
    ]
    flags += ["--metric-percentiles=50,90,99", "--seed=1", "--save-result", "--temperature=0"]
    flags += [f"--result-dir={options.save}", f"--result-filename={file}", f"--length-scale={options.scale}"]
    line = [sys.executable, "-m", "hex_llm.cli", "bench", "serve", *flags]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}", flush=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loads", nargs="*", help=", ".join(LOADS))
    parser.add_argument("--system", default="ours", choices=("ours", "vllm"))
    parser.add_argument("--serve", action="append", default=[], help="a flag of the server")
    parser.add_argument("--path", default="")
    parser.add_argument("--cache", help="a folder that keeps what was compiled")
    parser.add_argument("--port", type=int, default=7099)
    parser.add_argument("--save", default=".")
    parser.add_argument("--scale", type=float, default=1.0, help="of lengths")
    parser.add_argument(
        "--log", type=int, default=0, help="characters of the server's log to show at its end"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, options.tiny)
        write_tokenizer(model)
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        with server(options, model) as url:
            for name in options.loads or LOADS:
                run(url, name, LOADS[name], options)
        if options.log:
            print((model / LOG).read_text()[-options.log :])


if __name__ == "__main__":
    main()
