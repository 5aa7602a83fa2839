"""Output tokens per second through HTTP, beside those of the same workloads offline, on one GPU.

Run by `python -m tools.bench_gpu_http [names]` from the root. First tools/bench_gpu.py in its own process;
then `hex-llm serve` with the same shape, flags and compiled programs, under `hex-llm bench serve`: all
requests at once, prompts as token ids. The tokenizer is made up, so that the server turns tokens into text as
it would for a real model. --tiny: without a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import tokenizers

from tools.gpu_common import (
    FIRST,
    LLAMA_8B,
    ROOT,
    WORKLOADS,
    Workload,
    flags_for,
    run_part,
    started,
    tell_rate,
    write_model,
)

READY = re.compile(r"ready on (\S+)")
LOG = "log"  # of the server, in its model's folder


def drive(address: str, name: str, workload: Workload, folder: Path) -> dict[str, float]:
    """`hex-llm bench serve` in a process of its own; what it has measured."""
    path = folder / f"{name}.json"
    flags = [
        f"--base-url={address}", f"--num-prompts={workload.num_requests}",
        f"--random-input-len={workload.num_in}", f"--random-output-len={workload.num_out}",
        f"--temperature={workload.temperature}",
        "--save-result", "--save-detailed", f"--result-filename={path}", "--disable-tqdm",
    ]  # fmt: skip
    command = [sys.executable, "-m", "hex_llm.cli", "bench", "serve", *flags]
    if subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode:
        return {}
    result = json.loads(path.read_text())
    num_tokens = result["total_output_tokens"]
    assert num_tokens == workload.num_requests * workload.num_out, num_tokens
    tell_rate(name, workload, num_tokens, result["duration"])
    first_s = result["median_ttft_ms"] / 1000
    each = num_tokens / sum(1 + len(gaps) for gaps in result["itls"])
    print(f"    first token after {first_s:.2f} s (median), {each:.2f} tokens in an event", flush=True)
    return {"rate": result["output_throughput"], "first_s": first_s}


def write_tokenizer(folder: Path) -> None:
    """A word for every token that the model can choose; byte-level, as the real one is."""
    size = LLAMA_8B["vocab_size"]
    assert isinstance(size, int)
    # The bytes come first: who reads a vocabulary wants each of them to be a token.
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġ{i:05x}" for i in range(len(letters), size)]
    model = tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def server(folder: Path, cache: Path, tiny: bool, more: list[str]) -> AbstractContextManager[re.Match[str]]:
    """A match with its address, once it is ready."""
    flags = [f"--{name}={value}" for name, value in flags_for(tiny).items()]
    fixed = ["--load_format=dummy", "--host=127.0.0.1", "--port=0", f"--download_dir={cache}"]
    command = [sys.executable, "-m", "hex_llm.cli", "serve", str(folder), *fixed, *flags, *more]
    log = folder / LOG
    return started(command, log, lambda: READY.search(log.read_text()))


def measure(options: argparse.Namespace, folder: Path) -> None:
    names = options.names or ["c128", "prefill128"]
    tiny = ["--tiny"] if options.tiny else []
    cache = options.cache or folder / "cache"
    mine = [sys.executable, "-m", "tools.bench_gpu", f"--cache={cache}", *tiny]
    offline = {} if options.no_offline else run_part([*mine, *names])
    model = folder / "model"
    write_model(model, options.tiny)
    more = ["--skip_tokenizer_init"] if options.no_tokenizer else []
    if not options.no_tokenizer:
        write_tokenizer(model)
    workloads = {name: {**WORKLOADS, "first": FIRST}[name].scaled(options.tiny) for name in ["first", *names]}
    with server(model, cache, options.tiny, [*more, *options.serve]) as ready:
        served = {name: drive(ready[1], name, workload, folder) for name, workload in workloads.items()}
    if not all(served.values()):
        print(f"the server's log:\n{(model / LOG).read_text()[-3000:]}")
    print("| workload (tokens in / out) | HTTP, output tok/s | offline | ratio | first token, median |")
    print("|---|---|---|---|---|")
    for name in names:
        over, plain = served[name].get("rate"), offline.get(name)
        ratio = f"{over / plain:.2f}" if over and plain else "–"
        shown = [f"{rate:,.0f}" if rate else "–" for rate in (over, plain)]
        first = served[name].get("first_s", 0)
        print(f"| {workloads[name]} | {' | '.join(shown)} | {ratio} | {first:.2f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of workloads: {', '.join(WORKLOADS)}")
    parser.add_argument("--cache", type=Path, help="a folder that keeps what was compiled; else none does")
    parser.add_argument("--no-offline", action="store_true", help="HTTP alone")
    parser.add_argument("--no-tokenizer", action="store_true", help="token ids come back, no text")
    parser.add_argument("--serve", action="append", default=[], help="a further flag of the server's")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
