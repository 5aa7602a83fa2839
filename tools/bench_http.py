"""What the HTTP server costs for each token that it streams: its processor time, and the delay that it adds.

Run by `python -m tools.bench_http` from the root. Real processes: the server, a stand-in engine at a
given pace, and the clients, which share the machine. The delay is from the end of an engine's step to a
client's having read the token; the engine gives all streams a token at once, so it counts the wait for the
others'.
"""

from __future__ import annotations

import argparse
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from hex_llm.bench.client import allow_files
from tools.http_load import Stream, idle_connections, loaded_server, make_streams, read_all


def delays(streams: list[Stream], journal: Path) -> list[float]:
    """In seconds, of every letter."""
    told = json.loads(journal.read_text())
    found = []
    for stream in streams:
        first = told["first"][stream.prompt]
        # The prompt's first token, which is said last in every round, has no text.
        round_len = len(stream.prompt) + 1
        steps = [first + i for i in range(stream.num_tokens) if i % round_len != round_len - 1]
        found += [now - told["times"][step] for now, step in zip(stream.check(), steps, strict=True)]
    return found


def measure(args: argparse.Namespace, folder: Path) -> None:
    journal, profile = folder / "journal", str(folder / "profile") if args.profile else ""
    streams = make_streams(args.streams, args.tokens)
    num_files = allow_files(args.streams + args.idle + 200)
    num_idle = min(args.idle, num_files - args.streams - 200)
    with loaded_server(journal, tokens_per_s=args.rate, num_streams=args.streams, profile=profile) as (
        address,
        process,
    ):
        read_all(address, make_streams(args.streams, 20))  # warms up
        server = psutil.Process(process.pid)
        with idle_connections(address, num_idle):
            before, started = server.cpu_times(), time.monotonic()
            read_all(address, streams)
            wall = time.monotonic() - started
            after = server.cpu_times()
            used, system = sum(after[:2]) - sum(before[:2]), after.system - before.system
    late = sorted(delays(streams, journal))
    num_tokens = args.streams * args.tokens
    num_events = sum(stream.num_events for stream in streams)
    print(f"{args.streams} streams, {num_idle} idle connections, {args.rate:g} tokens/s asked for:")
    print(f"  {num_tokens / wall:.0f} tokens/s, {num_tokens / num_events:.2f} tokens in an event")
    print(
        f"  server: {used / num_tokens * 1e6:.1f} us of processor time a token, of which "
        f"{system / num_tokens * 1e6:.1f} in the system; {used / wall:.0%} of a core"
    )
    p50, p99 = statistics.median(late), late[int(len(late) * 0.99)]
    print(f"  delay: p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--rate", type=float, default=20_000, help="tokens per second of all streams")
    parser.add_argument("--idle", type=int, default=0, help="connections that do nothing meanwhile")
    parser.add_argument("--profile", action="store_true", help="show where the server's time goes")
    with tempfile.TemporaryDirectory() as folder:
        measure(parser.parse_args(), Path(folder))


if __name__ == "__main__":
    main()
