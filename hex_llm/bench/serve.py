"""`hex-llm bench serve`: one load against one server, at one or several rates of arrival; and `compare`: the
same load against two servers by turns, as ratios with their spread.

By turns, because a machine or network that changes meanwhile changes it for both; so each round gives a
ratio, and their spread says what a difference is worth.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from hex_llm.bench.arguments import client_parser, parse_client, positive
from hex_llm.bench.client import Server
from hex_llm.bench.load import Load
from hex_llm.bench.results import Result, block, plot, save
from hex_llm.errors import HexError

USUAL_PORTS = 7080, 8000  # of hex_llm and Hex-LLM, and of vLLM
COMPARED = "(request|output|total_token)_(throughput|goodput)|(?!std_).*_ms"


def _server_at(base_url: str, args: argparse.Namespace) -> Server:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return Server(base_url, headers | dict(args.header), insecure=args.insecure)


def _find_server(args: argparse.Namespace) -> Server:
    """At --base-url, else at --port, else at the first of the usual ports where somebody listens."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    ports = USUAL_PORTS if args.port is None else (args.port,)
    urls = [args.base_url] if args.base_url else [f"http://{host}:{port}" for port in ports]
    servers = [_server_at(url, args) for url in urls]
    for server in servers:
        with suppress(HexError):
            server.connect().close()
            return server
    return servers[0]


def serve(argv: Sequence[str]) -> None:
    args = parse_client(client_parser("serve", "Measures a server under a load."), argv)
    server = _find_server(args)
    load, runs = Load(args, server), list[Result]()
    for i, rate in enumerate(args.request_rate):
        samples = load.samples(i)
        print(f"{len(samples)} requests, {rate:g} a second", file=sys.stderr)
        runs.append(load.run(server, samples, rate))
        print(block(runs[-1], args.metric_percentiles), flush=True)
        save(runs[-1], args, rate, load.model, is_first=i == 0)
    if args.plot:
        plot(args.plot, args.metric_percentiles, {args.label or load.model: runs})


class Comparison(NamedTuple):
    """Of one number, over the rounds."""

    metric: str
    a: float
    b: float
    ratio: float  # B over A; all three are medians
    lowest: float
    highest: float


def comparisons(rounds: Sequence[Sequence[Result]]) -> list[Comparison]:
    """Of each number that is above 0 in every run."""
    compared = []
    for name in filter(re.compile(COMPARED).fullmatch, rounds[0][0]):
        pairs = [(a.get(name) or 0, b.get(name) or 0) for a, b in rounds]
        if all(a > 0 and b > 0 for a, b in pairs):
            ratios = [b / a for a, b in pairs]
            a, b, ratio = (statistics.median(values) for values in (*zip(*pairs, strict=True), ratios))
            compared.append(Comparison(name, a, b, ratio, min(ratios), max(ratios)))
    return compared


def compare(argv: Sequence[str]) -> None:
    parser = client_parser("compare", "Sends the same load to two servers by turns.", "A B [flags]")
    parser.add_argument("a", metavar="A", help="the URL of the first server")
    parser.add_argument("b", metavar="B", help="the URL of the second")
    parser.add_argument("--rounds", type=positive, default=3, help="runs against each, at each rate")
    args = parse_client(parser, argv)
    servers = [_server_at(url, args) for url in (args.a, args.b)]
    load = Load(args, *servers)
    curves: list[list[Result]] = [[], []]
    for i, rate in enumerate(args.request_rate):
        rounds = []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}, {rate:g} requests a second", file=sys.stderr)
            samples = load.samples(i * args.rounds + number)
            # Every other round begins with B, so that neither is always the second.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            runs = {which: load.run(servers[which], samples, rate) for which in order}
            rounds.append([runs[0], runs[1]])
        compared = comparisons(rounds)
        print(f"{args.rounds} rounds of {len(samples)} requests, {rate:g} a second")
        print(f"{'':<32} {'A':>12} {'B':>12} {'B / A':>8}   lowest to highest")
        for name, a, b, ratio, lowest, highest in compared:
            print(
                f"{name:<32} {a:>12.2f} {b:>12.2f} {ratio:>8.3f}   {lowest:.3f} to {highest:.3f}", flush=True
            )
        failed = [sum(one[which]["failed"] for one in rounds) for which in (0, 1)]
        if any(failed):
            print(f"{'failed requests, all rounds':<32} {failed[0]:>12} {failed[1]:>12}", flush=True)
        ratios = [one._asdict() for one in compared]
        content = {"a": args.a, "b": args.b, "rounds": rounds, "compared": ratios}
        save(content, args, rate, load.model, is_first=i == 0)
        for which, curve in enumerate(curves):
            curve.append(rounds[-1][which] | {one.metric: (one.a, one.b)[which] for one in compared})
    if args.plot:
        plot(args.plot, args.metric_percentiles, dict(zip((args.a, args.b), curves, strict=True)))
