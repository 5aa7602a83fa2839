"""`hex-llm bench serve`: one load against one server, at one or several rates of arrival."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hex_llm.bench import plot, report
from hex_llm.bench.arguments import client_parser, parse_client
from hex_llm.bench.arrivals import arrival_times
from hex_llm.bench.backends import DIALECTS, Dialect, Reply, Settings
from hex_llm.bench.client import HttpClient, allow_connections
from hex_llm.bench.datasets import NEED_TEXT, make_samples
from hex_llm.bench.load import RETRY_S, Load
from hex_llm.bench.measures import Result, measure
from hex_llm.bench.samples import Sample, Source
from hex_llm.bench.server import Server, server_side
from hex_llm.bench.tokenizers import SMALLEST_VOCABULARY, BenchTokenizer, find_tokenizer
from hex_llm.errors import HexError

try:
    import uvloop as loops
except ImportError:  # on Windows there is none
    import asyncio as loops  # type: ignore[no-redef]

USUAL_PORTS = 7080, 8000  # of hex_llm and Hex-LLM, and of vLLM
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "logprobs", "frequency_penalty", "presence_penalty",
            "repetition_penalty")  # fmt: skip
T = TypeVar("T")


@dataclass
class Bench:
    """What is the same in all runs of a command."""

    args: argparse.Namespace
    model: str
    tokenizer: BenchTokenizer | None

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.args.backend]

    def samples(self, run: int) -> list[Sample]:
        """Of the run with this number: made-up prompts are new in each, lest a prefix cache have them."""
        args = argparse.Namespace(**{**vars(self.args), "seed": self.args.seed + run})
        vocab_size = self.tokenizer.vocab_size if self.tokenizer else SMALLEST_VOCABULARY
        samples = make_samples(Source(args, self.tokenizer, self.dialect.takes_ids, vocab_size))
        if not samples:
            raise HexError(f"--num-prompts {args.num_prompts}: there is nothing to send")
        return samples

    def run(self, server: Server, samples: Sequence[Sample], rate: float) -> Result:
        """One run; raises HexError if no request succeeds."""
        allow_connections()
        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
            replies, duration, facts = runner.run(self._send(server, samples, rate))
        if not any(reply.success for reply in replies):
            raise HexError(f"all {len(replies)} requests failed; the first: {replies[0].error}")
        for reply in replies:
            self._count_output(reply)
        args = self.args
        result = measure(
            replies,
            duration,
            metrics=args.percentile_metrics,
            percentiles=args.metric_percentiles,
            goodput=dict(args.goodput or ()),
            is_limited=args.max_concurrency is not None,
            is_paced=rate != float("inf"),
        )
        return {**result, "server": facts}

    async def _send(
        self, server: Server, samples: Sequence[Sample], rate: float
    ) -> tuple[list[Reply], float, dict[str, float]]:
        """The replies, the seconds, and what the server has counted meanwhile."""
        args = self.args
        client = HttpClient(server.base_url, server.headers, insecure=server.insecure)
        load = Load(
            client,
            self.dialect,
            args.endpoint or self.dialect.path,
            self._settings(grows=any(sample.follows for sample in samples)),
            args.max_concurrency,
            request_id_prefix=args.request_id_prefix,
            show_progress=not args.disable_tqdm,
        )
        try:
            if args.ready_check_timeout_sec > 0:
                await load.wait_until_ready(samples[0], args.ready_check_timeout_sec)
            await load.warm_up(samples[0], args.num_warmups)
            before = server.counters()
            replies, duration = await load.run(samples, arrival_times(len(samples), rate, args))
            return replies, duration, server_side(before, server.counters())
        finally:
            client.close()

    def _settings(self, *, grows: bool) -> Settings:
        args = self.args
        sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
        model, wants_ids = args.served_model_name or self.model, grows and self.dialect.takes_ids
        return Settings(model, sampling, args.ignore_eos, args.extra_body, wants_token_ids=wants_ids)

    def _count_output(self, reply: Reply) -> None:
        """Where the server has not said: by the tokenizer, else a token for each piece."""
        if reply.success and not reply.output_tokens:
            ids = self.tokenizer.encode(reply.text) if self.tokenizer else []
            special = len(self.tokenizer.encode("")) if self.tokenizer else 0
            reply.output_tokens = len(ids) - special or len(reply.texts)


def server_at(base_url: str, args: argparse.Namespace) -> Server:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return Server(base_url, headers | dict(args.header), insecure=args.insecure)


def find_server(args: argparse.Namespace) -> Server:
    """At --base-url, else at --port, else at the first of the usual ports where somebody listens."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    ports = USUAL_PORTS if args.port is None else (args.port,)
    urls = [args.base_url] if args.base_url else [f"http://{host}:{port}" for port in ports]
    servers = [server_at(url, args) for url in urls]
    return next((server for server in servers if server.is_reachable()), servers[0])


def prepare(args: argparse.Namespace, server: Server) -> Bench:
    """Asks the server what must be known before prompts can be made."""
    if args.plot:
        plot.check_available()
    patience_s = args.ready_check_timeout_sec
    _patiently(server.check_reachable, patience_s)
    model, dialect = args.model or _patiently(server.first_model, patience_s), DIALECTS[args.backend]
    required = args.dataset_name in NEED_TEXT or not dialect.takes_ids
    return Bench(args, model, find_tokenizer(args, server, model, required=required))


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


def serve(argv: Sequence[str]) -> None:
    args = parse_client(client_parser("serve", "Measures a server under a load."), argv)
    server = find_server(args)
    bench = prepare(args, server)
    curve = []
    for i, rate in enumerate(args.request_rate):
        samples = bench.samples(i)
        print(f"{len(samples)} requests, {rate:g} a second", file=sys.stderr)
        result = bench.run(server, samples, rate)
        curve.append((rate, result))
        for error in list(dict.fromkeys(filter(None, result["errors"])))[:10]:
            print(f"failed: {error}", file=sys.stderr)
        print(report.block(result, args, rate), flush=True)
        content = report.described(result, args, rate, bench.model)
        report.save(content, args, rate, bench.model, is_first=i == 0)
    if args.plot:
        plot.draw(args.plot, {args.label or bench.model: curve})
