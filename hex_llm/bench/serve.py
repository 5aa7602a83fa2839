"""`hex-llm bench serve`: one load against one server, at one or several rates of arrival; and `compare`: the
same load against two servers by turns, as ratios with their spread.

By turns, because a machine or network that changes meanwhile changes it for both; so each round gives a
ratio, and their spread says what a difference is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from hex_llm.bench import results
from hex_llm.bench.arguments import client_parser, parse_client, positive
from hex_llm.bench.backends import DIALECTS, Reply
from hex_llm.bench.client import Server, allow_connections
from hex_llm.bench.datasets import NEED_TEXT, Sample, Source, make_samples
from hex_llm.bench.load import Load, arrival_times
from hex_llm.bench.results import Result
from hex_llm.bench.tokenizers import SMALLEST_VOCABULARY, BenchTokenizer, find_tokenizer
from hex_llm.errors import HexError

try:
    import uvloop as loops
except ImportError:  # on Windows there is none
    import asyncio as loops  # type: ignore[no-redef]

USUAL_PORTS = 7080, 8000  # of hex_llm and Hex-LLM, and of vLLM
RETRY_S = 1.0
COMPARED = "(request|output|total_token)_(throughput|goodput)|(?!std_).*_ms"
T = TypeVar("T")


def _patiently(ask: Callable[[], T], timeout_s: float) -> T:
    """Asks again and again until there is an answer, at most so long."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except HexError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


@dataclass
class Bench:
    """What is the same in all runs of a command."""

    args: argparse.Namespace
    model: str
    tokenizer: BenchTokenizer | None

    @classmethod
    def prepare(cls, args: argparse.Namespace, *servers: Server) -> Bench:
        """Asks the first server what must be known before prompts can be made."""
        if args.plot:
            results.check_plot_available()
        patience_s, dialect = args.ready_check_timeout_sec, DIALECTS[args.backend]
        for server in servers:
            _patiently(server.connect, patience_s).close()
        model = args.model or _patiently(servers[0].first_model, patience_s)
        required = args.dataset_name in NEED_TEXT or not dialect.takes_ids
        return cls(args, model, find_tokenizer(args, servers[0], model, required=required))

    def samples(self, run: int) -> list[Sample]:
        """Of the run with this number: made-up prompts are new in each, lest a prefix cache have them."""
        args = argparse.Namespace(**{**vars(self.args), "seed": self.args.seed + run})
        vocab_size = self.tokenizer.vocab_size if self.tokenizer else SMALLEST_VOCABULARY
        samples = make_samples(Source(args, self.tokenizer, DIALECTS[args.backend].takes_ids, vocab_size))
        if not samples:
            raise HexError(f"--num-prompts {args.num_prompts}: there is nothing to send")
        return samples

    def run(self, server: Server, samples: Sequence[Sample], rate: float) -> Result:
        """One run, as its file describes it; raises HexError if no request succeeds."""
        replies, duration, facts = self._send(server, samples, rate)
        if not any(reply.success for reply in replies):
            raise HexError(f"all {len(replies)} requests failed; the first: {replies[0].error}")
        for error in list(dict.fromkeys(reply.error for reply in replies if reply.error))[:10]:
            print(f"failed: {error}", file=sys.stderr)
        for reply in replies:
            reply.output_tokens = self._num_output_tokens(reply)
        return results.measure(replies, duration, self.args, rate, self.model) | {"server": facts}

    def _send(
        self, server: Server, samples: Sequence[Sample], rate: float
    ) -> tuple[list[Reply], float, dict[str, float]]:
        """The replies, the seconds, and what the server has counted meanwhile."""
        args = self.args
        allow_connections()
        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner, closing(server):
            load = Load(server, args, args.served_model_name or self.model, samples)
            if args.ready_check_timeout_sec:
                _patiently(lambda: runner.run(load.check_ready()), args.ready_check_timeout_sec)
            runner.run(load.warm_up())
            before = server.counters()
            replies, duration = runner.run(load.run(arrival_times(len(samples), rate, args)))
        return replies, duration, results.server_side(before, server.counters())

    def _num_output_tokens(self, reply: Reply) -> int:
        """Where the server has not said: by the tokenizer, else a token for each piece."""
        if not reply.success:
            return 0
        if reply.output_tokens or not self.tokenizer:
            return reply.output_tokens or len(reply.texts)
        num_special = len(self.tokenizer.encode(""))
        return len(self.tokenizer.encode(reply.text)) - num_special or len(reply.texts)


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
    bench, runs = Bench.prepare(args, server), list[Result]()
    for i, rate in enumerate(args.request_rate):
        samples = bench.samples(i)
        print(f"{len(samples)} requests, {rate:g} a second", file=sys.stderr)
        runs.append(bench.run(server, samples, rate))
        print(results.block(runs[-1], args.metric_percentiles), flush=True)
        results.save(runs[-1], args, rate, bench.model, is_first=i == 0)
    if args.plot:
        results.plot(args.plot, args.metric_percentiles, {args.label or bench.model: runs})


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
    bench = Bench.prepare(args, *servers)
    curves: list[list[Result]] = [[], []]
    for i, rate in enumerate(args.request_rate):
        rounds = []
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}, {rate:g} requests a second", file=sys.stderr)
            samples = bench.samples(i * args.rounds + number)
            # Every other round begins with B, so that neither is always the second.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            runs = {which: bench.run(servers[which], samples, rate) for which in order}
            rounds.append([runs[0], runs[1]])
        compared = comparisons(rounds)
        print(f"{args.rounds} rounds of {len(samples)} requests, {rate:g} a second")
        print(f"{'':<32} {'A':>12} {'B':>12} {'B / A':>8}   lowest to highest")
        for name, a, b, ratio, lowest, highest in compared:
            print(
                f"{name:<32} {a:>12.2f} {b:>12.2f} {ratio:>8.3f}   {lowest:.3f} to {highest:.3f}", flush=True
            )
        ratios = [one._asdict() for one in compared]
        content = {"a": args.a, "b": args.b, "rounds": rounds, "compared": ratios}
        results.save(content, args, rate, bench.model, is_first=i == 0)
        for which, curve in enumerate(curves):
            curve.append(rounds[-1][which] | {one.metric: (one.a, one.b)[which] for one in compared})
    if args.plot:
        results.plot(args.plot, args.metric_percentiles, dict(zip((args.a, args.b), curves, strict=True)))
