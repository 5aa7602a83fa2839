"""The open loop: requests are sent when they are due, whether or not the server keeps up."""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from hex_llm.bench.backends import DIALECTS, SAMPLING, PieceReader, Reply
from hex_llm.bench.client import Refused, Server
from hex_llm.bench.datasets import Sample
from hex_llm.errors import HexError


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


@dataclass
class Load:
    """Some samples against one server, as the flags say. Not to be used again."""

    server: Server
    args: argparse.Namespace
    model: str
    samples: Sequence[Sample]
    _replies: dict[Sample, asyncio.Task[Reply]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        args, dialect = self.args, DIALECTS[self.args.backend]
        self._dialect, self._path = dialect, args.endpoint or dialect.path
        self._params = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
        if args.ignore_eos:
            self._params["ignore_eos"] = True
        if dialect.takes_ids and any(sample.follows for sample in self.samples):
            # The next turn continues with the answer's own tokens.
            self._params["return_token_ids"] = True
        self._params |= args.extra_body

    async def check_ready(self) -> None:
        """Raises HexError if the server does not answer the first sample."""
        if not (reply := await self._ask(self.samples[0], "ready", nullcontext())).success:
            patience_s = self.args.ready_check_timeout_sec
            raise HexError(f"no answer within {patience_s:g} s; the last try: {reply.error}")

    async def warm_up(self) -> None:
        limit, sample = self._limit(), self.samples[0]
        await asyncio.gather(*(self._ask(sample, f"warmup-{i}", limit) for i in range(self.args.num_warmups)))

    async def run(self, times: Sequence[float]) -> tuple[list[Reply], float]:
        """The replies, in the order of the samples, and the seconds from first to last."""
        gc.collect()
        gc.freeze()  # prompts are many objects, and a collection would hold all streams up
        limit, start = self._limit(), time.perf_counter()
        with tqdm(total=len(self.samples), file=sys.stderr, disable=self.args.disable_tqdm) as bar:
            for i, (sample, due) in enumerate(zip(self.samples, times, strict=True)):
                if (wait := start + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                task = asyncio.create_task(self._ask(sample, str(i), limit))
                task.add_done_callback(lambda _: bar.update())
                self._replies[sample] = task
            replies = await asyncio.gather(*self._replies.values())
        gc.unfreeze()
        return replies, time.perf_counter() - start

    def _limit(self) -> Any:
        return asyncio.Semaphore(self.args.max_concurrency) if self.args.max_concurrency else nullcontext()

    async def _ask(self, sample: Sample, name: str, limit: Any) -> Reply:
        reply = await self._begun(sample)
        payload = self._dialect.payload(reply.turns, sample.output_len, self.model, self._params)
        reader = PieceReader(self._dialect, reply)
        arrived = time.perf_counter()
        async with limit:
            reply.start_time = time.perf_counter()
            try:
                request_id = self.args.request_id_prefix + name
                await self.server.post(self._path, payload, reader.feed, request_id)
            except (Refused, OSError) as error:
                reply.error = str(error) or type(error).__name__
        reader.end()
        reply.queue_time = reply.start_time - arrived
        if not reply.texts and not reply.error:
            reply.error = "the answer holds no token"
        return reply

    async def _begun(self, sample: Sample) -> Reply:
        """An empty reply with the conversation up to this sample, once the answer before it is there."""
        if (previous := sample.follows) is None:
            return Reply(sample.prompt_len, turns=[sample.prompt])
        answered, takes_ids = await self._replies[previous], self._dialect.takes_ids
        if answered.success and takes_ids and not answered.token_ids:
            raise HexError("the server tells no token ids to continue with; use --backend openai-chat")
        answer = answered.token_ids if takes_ids else answered.text
        num_before = answered.prompt_len + (answered.output_tokens or len(answered.texts))
        return Reply(num_before + sample.prompt_len, turns=[*answered.turns, answer, sample.prompt])
