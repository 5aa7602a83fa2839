"""The open loop: requests are sent when they are due, whether or not the server keeps up."""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from hex_llm.bench import results
from hex_llm.bench.backends import DIALECTS, SAMPLING, PieceReader, Reply
from hex_llm.bench.client import Refused, Server, allow_files
from hex_llm.bench.datasets import NEED_TEXT, Sample, Source, make_samples
from hex_llm.bench.tokenizers import SMALLEST_VOCABULARY, find_tokenizer
from hex_llm.errors import HexError
from hex_llm.heap import kept

try:
    import uvloop as loops
except ImportError:  # on Windows there is none
    import asyncio as loops  # type: ignore[no-redef]

RETRY_S = 1.0
MAX_FILES = 65_536  # an open loop may have thousands of connections
T = TypeVar("T")


def arrival_times(num_requests: int, rate: float, args: argparse.Namespace) -> list[float]:
    """Seconds from the start, of each request; the same as vLLM's for the same seed.

    Without a ramp the times are stretched to what so many requests take at this rate, so that two seeds make
    the same throughput.
    """
    rates, progress = np.full(num_requests, rate), np.linspace(0, 1, num_requests)
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy == "linear":
        rates = start + (end - start) * progress
    elif args.ramp_up_strategy == "exponential":
        rates = start * (end / start) ** progress
    if math.isinf(rates[0]):
        return [0.0] * num_requests
    gaps = 1 / rates
    if not math.isinf(args.burstiness):
        gaps = np.random.RandomState(args.seed % 2**32).gamma(args.burstiness, gaps / args.burstiness)
    times = gaps.cumsum()
    if not args.ramp_up_strategy:
        times *= num_requests / rate / times[-1]
    return [float(time) for time in times]


def patiently(ask: Callable[[], T], timeout_s: float) -> T:
    """Asks again and again until there is an answer, at most so long."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ask()
        except HexError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


class Load:
    """What the flags ask for, in as many runs as are wanted, against any of the servers."""

    def __init__(self, args: argparse.Namespace, *servers: Server) -> None:
        """Asks the first server what must be known before prompts can be made."""
        if args.plot:
            results.check_plot_available()
        self.args, self._dialect = args, DIALECTS[args.backend]
        for server in servers:
            patiently(server.connect, args.ready_check_timeout_sec).close()
        self.model = args.model or patiently(servers[0].first_model, args.ready_check_timeout_sec)
        required = args.dataset_name in NEED_TEXT or not self._dialect.takes_ids
        self._tokenizer = find_tokenizer(args, servers[0], self.model, required=required)
        self._replies: dict[Sample, asyncio.Task[Reply]] = {}
        self._params = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
        if args.ignore_eos:
            self._params["ignore_eos"] = True
        datasets = dict(args.mix) if args.dataset_name == "mixture" else (args.dataset_name,)
        if "multi-turn" in datasets and self._dialect.takes_ids:
            # The next turn continues with the answer's own tokens.
            self._params["return_token_ids"] = True
        self._params |= args.extra_body

    def samples(self, run: int) -> list[Sample]:
        """Of the run with this number: made-up prompts are new in each, lest a prefix cache have them."""
        args = argparse.Namespace(**{**vars(self.args), "seed": self.args.seed + run})
        vocab_size = self._tokenizer.vocab_size if self._tokenizer else SMALLEST_VOCABULARY
        samples = make_samples(Source(args, self._tokenizer, self._dialect.takes_ids, vocab_size))
        if not samples:
            raise HexError(f"--num-prompts {args.num_prompts}: there is nothing to send")
        return samples

    def run(self, server: Server, samples: Sequence[Sample], rate: float) -> results.Result:
        """One run, as its file describes it; raises HexError if no request succeeds."""
        args, times = self.args, arrival_times(len(samples), rate, self.args)
        allow_files(MAX_FILES)
        with asyncio.Runner(loop_factory=loops.new_event_loop) as runner, closing(server):
            if args.ready_check_timeout_sec:
                patiently(lambda: self._check_ready(runner, server, samples[0]), args.ready_check_timeout_sec)
            warmups = [samples[0]] * args.num_warmups
            runner.run(self._send(server, warmups, [0.0] * len(warmups), "warmup-"))
            gc.collect()
            before = server.counters()
            with kept():  # prompts are many objects
                replies, duration = runner.run(self._send(server, samples, times))
        facts = results.server_side(before, server.counters())
        if not any(reply.success for reply in replies):
            raise HexError(f"all {len(replies)} requests failed; the first: {replies[0].error}")
        for error in list(dict.fromkeys(reply.error for reply in replies if reply.error))[:10]:
            print(f"failed: {error}", file=sys.stderr)
        for reply in replies:
            reply.output_tokens = self._num_output_tokens(reply)
        return results.measure(replies, duration, args, rate, self.model) | {"server": facts}

    def _num_output_tokens(self, reply: Reply) -> int:
        """Where the server has not said: by the tokenizer, else a token for each piece."""
        if not reply.success:
            return 0
        if reply.output_tokens or not self._tokenizer:
            return reply.output_tokens or len(reply.texts)
        num_special = len(self._tokenizer.encode(""))
        return len(self._tokenizer.encode(reply.text)) - num_special or len(reply.texts)

    def _check_ready(self, runner: asyncio.Runner, server: Server, sample: Sample) -> None:
        (reply,), _ = runner.run(self._send(server, [sample], [0.0], "ready-"))
        if not reply.success:
            patience_s = self.args.ready_check_timeout_sec
            raise HexError(f"no answer within {patience_s:g} s; the last try: {reply.error}")

    async def _send(
        self, server: Server, samples: Sequence[Sample], times: Sequence[float], kind: str = ""
    ) -> tuple[list[Reply], float]:
        """The replies, in the order of the samples, and the seconds from first to last."""
        self._replies.clear()
        limit = asyncio.Semaphore(self.args.max_concurrency) if self.args.max_concurrency else nullcontext()
        tasks, start = list[asyncio.Task[Reply]](), time.perf_counter()
        with tqdm(total=len(samples), file=sys.stderr, disable=bool(kind) or self.args.disable_tqdm) as bar:
            for i, (sample, due) in enumerate(zip(samples, times, strict=True)):
                if (wait := start + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                task = asyncio.create_task(self._ask(server, sample, f"{kind}{i}", limit))
                task.add_done_callback(lambda _: bar.update())
                tasks.append(task)
                self._replies[sample] = task
            replies = await asyncio.gather(*tasks)
        return replies, time.perf_counter() - start

    async def _ask(self, server: Server, sample: Sample, name: str, limit: Any) -> Reply:
        args, dialect, reply = self.args, self._dialect, await self._empty_reply(sample)
        model = args.served_model_name or self.model
        payload = dialect.payload(reply.turns, sample.output_len, model, self._params)
        reader, arrived = PieceReader(dialect, reply), time.perf_counter()
        async with limit:
            reply.start_time = time.perf_counter()
            try:
                path = args.endpoint or dialect.path
                await server.post(path, payload, reader.feed, args.request_id_prefix + name)
            except (Refused, OSError) as error:
                reply.error = str(error) or type(error).__name__
        reader.end()
        reply.queue_time = reply.start_time - arrived
        if not reply.texts and not reply.error:
            reply.error = "the answer holds no token"
        return reply

    async def _empty_reply(self, sample: Sample) -> Reply:
        """With the conversation up to this sample, once the answer before it is there."""
        if (previous := sample.follows) is None:
            return Reply(sample.prompt_len, turns=[sample.prompt])
        answered, takes_ids = await self._replies[previous], self._dialect.takes_ids
        if answered.success and takes_ids and not answered.token_ids:
            raise HexError("the server tells no token ids to continue with; use --backend openai-chat")
        answer = answered.token_ids if takes_ids else answered.text
        num_before = answered.prompt_len + (answered.output_tokens or len(answered.texts))
        return Reply(num_before + sample.prompt_len, turns=[*answered.turns, answer, sample.prompt])
