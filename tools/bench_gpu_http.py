"""Output tokens per second through HTTP, beside those of the same workloads offline, on one GPU.

Run by `python -m tools.bench_gpu_http [names]` from the root. First tools/bench_gpu.py in its own process;
then `hex-llm serve` with the same shape, flags and compiled programs, and clients in a third process: one
connection for each request, all at once, prompts as token ids, replies as streams. The tokenizer is made up,
so that the server turns tokens into text as it would for a real model. --tiny: without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import tokenizers

from tools.gpu_common import (
    FIRST,
    LLAMA_8B,
    ROOT,
    WORKLOADS,
    Workload,
    flags_for,
    run_part,
    tell,
    tell_rate,
    write_model,
)

READY = re.compile(r"ready on (\S+)")
STOP_S = 30
LOG = "log"  # of the server, in its model's folder


@dataclass
class Reply:
    """One stream as it came; it is looked at when all have ended, so that the client holds nothing up."""

    body: bytes
    parts: list[bytes] = field(default_factory=list)
    first_s: float = 0.0  # from the start of all to the first event of this one

    def num_tokens(self) -> int:
        data = b"".join(self.parts)
        assert data.startswith(b"HTTP/1.1 200 "), data[:1000]
        assert b"data: [DONE]" in data, data[-1000:]
        return int(re.findall(rb'"completion_tokens":(\d+)', data)[-1])

    def num_events(self) -> int:
        return sum(part.count(b"data: ") for part in self.parts) - 2  # the usage, and DONE


def bodies(name: str, workload: Workload) -> list[bytes]:
    fixed = {
        "max_tokens": workload.num_out,
        "temperature": workload.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [json.dumps({"prompt": ids, **fixed}).encode() for ids in workload.prompts(name)]


async def read(address: str, reply: Reply, began: float) -> None:
    url = urlsplit(address)
    reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=1 << 20)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(reply.body), reply.body)
    )
    while part := await reader.read(1 << 16):
        if not reply.first_s and b"data: " in part:
            reply.first_s = time.perf_counter() - began
        reply.parts.append(part)
    writer.close()


async def read_all(address: str, replies: list[Reply]) -> float:
    """Seconds."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for reply in replies:
            group.create_task(read(address, reply, began))
    return time.perf_counter() - began


def drive(address: str, name: str, workload: Workload) -> None:
    """The clients' process."""
    replies = [Reply(body) for body in bodies(name, workload)]
    seconds = asyncio.run(read_all(address, replies))
    num_tokens = sum(reply.num_tokens() for reply in replies)
    assert num_tokens == workload.num_requests * workload.num_out, num_tokens
    tell_rate(name, workload, num_tokens, seconds)
    first = statistics.median(reply.first_s for reply in replies)
    tell("first_s", first)
    each = num_tokens / sum(reply.num_events() for reply in replies)
    print(f"    first token after {first:.2f} s (median), {each:.2f} tokens in an event", flush=True)


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


@contextmanager
def server(folder: Path, cache: Path, tiny: bool, more: list[str]) -> Iterator[str]:
    """Its address, once it is ready; it is stopped at the end, and its log shown if it cannot start."""
    flags = [f"--{name}={value}" for name, value in flags_for(tiny).items()]
    fixed = ["--load_format=dummy", "--host=127.0.0.1", "--port=0", f"--download_dir={cache}"]
    command = [sys.executable, "-m", "hex_llm.cli", "serve", str(folder), *fixed, *flags, *more]
    print(f"$ {' '.join(command)}", flush=True)
    log, began = folder / LOG, time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    try:
        while not (found := READY.search(log.read_text())):
            time.sleep(0.1)
            if process.poll() is not None:
                raise SystemExit(f"the server failed:\n{log.read_text()[-3000:]}")
        print(f"the server is ready after {time.perf_counter() - began:.1f} s", flush=True)
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
    client = [sys.executable, "-m", "tools.bench_gpu_http", *tiny, "--client"]
    with server(model, cache, options.tiny, [*more, *options.serve]) as address:
        found = {name: run_part([*client, address, name]) for name in ["first", *names]}
    if not all(found.values()):
        print(f"the server's log:\n{(model / LOG).read_text()[-3000:]}")
    print("| workload (tokens in / out) | HTTP, output tok/s | offline | ratio | first token, median |")
    print("|---|---|---|---|---|")
    for name in names:
        over, plain = found[name].get(name), offline.get(name)
        ratio = f"{over / plain:.2f}" if over and plain else "–"
        shown = [f"{rate:,.0f}" if rate else "–" for rate in (over, plain)]
        first = found[name].get("first_s", 0)
        print(f"| {WORKLOADS[name].scaled(options.tiny)} | {' | '.join(shown)} | {ratio} | {first:.2f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of workloads: {', '.join(WORKLOADS)}")
    parser.add_argument("--cache", type=Path, help="a folder that keeps what was compiled; else none does")
    parser.add_argument("--no-offline", action="store_true", help="HTTP alone")
    parser.add_argument("--no-tokenizer", action="store_true", help="token ids come back, no text")
    parser.add_argument("--serve", action="append", default=[], help="a further flag of the server's")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens")
    parser.add_argument("--client", metavar="ADDRESS", help="be the clients of a server that runs there")
    options = parser.parse_args()
    if options.client:
        for name in options.names:
            drive(options.client, name, {**WORKLOADS, "first": FIRST}[name].scaled(options.tiny))
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
