"""`hex-llm bench compare A B`: the same load against two servers by turns, as ratios with their spread.

By turns, because a machine or network that changes meanwhile changes it for both; so each round gives a
ratio, and their spread says what a difference is worth.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from hex_llm.bench import plot, report
from hex_llm.bench.arguments import client_parser, parse_client, positive
from hex_llm.bench.measures import Result
from hex_llm.bench.serve import prepare, server_at

THROUGHPUTS = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")


class Comparison(NamedTuple):
    """Of one number, over the rounds."""

    metric: str
    a: float
    b: float
    ratio: float  # B over A; all three are medians
    lowest: float
    highest: float

    def __str__(self) -> str:
        spread = f"{self.lowest:.3f} to {self.highest:.3f}"
        return f"{self.metric:<32} {self.a:>12.2f} {self.b:>12.2f} {self.ratio:>8.3f}   {spread}"


def comparisons(rounds: Sequence[tuple[Result, Result]]) -> list[Comparison]:
    """Of each number that is above 0 in every run."""
    names = [name for name in rounds[0][0] if name in THROUGHPUTS or re.fullmatch("(?!std_).*_ms", name)]
    compared = []
    for name in names:
        pairs = [(a.get(name) or 0, b.get(name) or 0) for a, b in rounds]
        if all(a > 0 and b > 0 for a, b in pairs):
            ratios = [b / a for a, b in pairs]
            a, b, ratio = (statistics.median(values) for values in (*zip(*pairs, strict=True), ratios))
            compared.append(Comparison(name, a, b, ratio, min(ratios), max(ratios)))
    return compared


def table(compared: Sequence[Comparison]) -> str:
    head = f"{'':<32} {'A':>12} {'B':>12} {'B / A':>8}   lowest to highest"
    return "\n".join([head, *map(str, compared)])


def compare(argv: Sequence[str]) -> None:
    parser = client_parser("compare", "Sends the same load to two servers by turns.")
    parser.usage = "hex-llm bench compare A B [flags]"
    parser.add_argument("a", metavar="A", help="the URL of the first server")
    parser.add_argument("b", metavar="B", help="the URL of the second")
    parser.add_argument("--rounds", type=positive, default=3, help="runs against each, at each rate")
    args = parse_client(parser, argv)
    servers = [server_at(url, args) for url in (args.a, args.b)]
    bench = prepare(args, servers[0])
    servers[1].check_reachable()
    curves: list[list[tuple[float, Result]]] = [[], []]
    for i, rate in enumerate(args.request_rate):
        rounds = []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}, {rate:g} requests a second", file=sys.stderr)
            # Every other round begins with B, so that neither is always the second.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            samples = bench.samples(i * args.rounds + number)
            results = {which: bench.run(servers[which], samples, rate) for which in order}
            rounds.append((results[0], results[1]))
        compared = comparisons(rounds)
        print(f"{args.rounds} rounds of {len(samples)} requests, {rate:g} a second")
        print(table(compared), flush=True)
        runs = [[report.described(one, args, rate, bench.model) for one in pair] for pair in rounds]
        ratios = [one._asdict() for one in compared]
        content = {"a": args.a, "b": args.b, "rounds": runs, "compared": ratios}
        report.save(content, args, rate, bench.model, is_first=i == 0)
        for which, curve in enumerate(curves):
            medians = {one.metric: (one.a, one.b)[which] for one in compared}
            curve.append((rate, rounds[-1][which] | medians))
    if args.plot:
        plot.draw(args.plot, dict(zip((args.a, args.b), curves, strict=True)))
