"""The open loop: requests are sent when they are due, whether or not the server keeps up."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tqdm import tqdm

from hex_llm.bench.backends import Dialect, PieceReader, Prompt, Reply, Settings
from hex_llm.bench.client import HttpClient, Refused
from hex_llm.bench.samples import Sample
from hex_llm.errors import HexError

RETRY_S = 1.0


@dataclass
class Load:
    """One run of some samples against one server. Not to be used again."""

    client: HttpClient
    dialect: Dialect
    path: str
    settings: Settings
    max_concurrency: int | None = None
    request_id_prefix: str = ""
    show_progress: bool = False
    _replies: dict[Sample, asyncio.Task[Reply]] = field(default_factory=dict)
    _turns: dict[Sample, list[Prompt]] = field(default_factory=dict)

    async def wait_until_ready(self, sample: Sample, timeout_s: float) -> None:
        """Until the server has answered once; raises HexError."""
        deadline = time.perf_counter() + timeout_s
        while not (reply := await self._ask(sample, "ready", nullcontext())).success:
            if time.perf_counter() > deadline:
                raise HexError(f"no answer within {timeout_s:g} s; the last try: {reply.error}")
            await asyncio.sleep(RETRY_S)

    async def warm_up(self, sample: Sample, num_requests: int) -> None:
        limit = self._limit()
        await asyncio.gather(*(self._ask(sample, f"warmup-{i}", limit) for i in range(num_requests)))

    async def run(self, samples: Sequence[Sample], times: Sequence[float]) -> tuple[list[Reply], float]:
        """The replies, in the order of the samples, and the seconds from first to last."""
        gc.collect()
        gc.freeze()  # prompts are many objects, and a collection would hold all streams up
        limit, start = self._limit(), time.perf_counter()
        with tqdm(total=len(samples), file=sys.stderr, disable=not self.show_progress) as bar:
            for i, (sample, due) in enumerate(zip(samples, times, strict=True)):
                if (wait := start + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                task = asyncio.create_task(self._ask(sample, str(i), limit))
                task.add_done_callback(lambda _: bar.update())
                self._replies[sample] = task
            replies = await asyncio.gather(*self._replies.values())
        gc.unfreeze()
        return replies, time.perf_counter() - start

    def _limit(self) -> AbstractAsyncContextManager[Any]:
        return asyncio.Semaphore(self.max_concurrency) if self.max_concurrency else nullcontext()

    async def _ask(self, sample: Sample, name: str, limit: AbstractAsyncContextManager[Any]) -> Reply:
        turns, reply = await self._continued(sample)
        body = msgspec.json.encode(self.dialect.payload(turns, sample.output_len, self.settings))
        reader = PieceReader(self.dialect, reply)
        arrived = time.perf_counter()
        async with limit:
            reply.start_time = time.perf_counter()
            try:
                await self.client.post(self.path, body, reader.feed, self.request_id_prefix + name)
            except (Refused, OSError) as error:
                reply.error = str(error) or type(error).__name__
        reader.end()
        reply.queue_time = reply.start_time - arrived
        if not reply.texts and not reply.error:
            reply.error = "the answer holds no token"
        return reply

    async def _continued(self, sample: Sample) -> tuple[list[Prompt], Reply]:
        """The conversation up to this sample, once the answer before it is there; and an empty reply."""
        if (previous := sample.follows) is None:
            turns, reply = [sample.prompt], Reply(sample.prompt_len)
        else:
            answered, wants_ids = await self._replies[previous], self.settings.wants_token_ids
            if answered.success and wants_ids and not answered.token_ids:
                raise HexError("the server tells no token ids to continue with; use --backend openai-chat")
            answer = answered.token_ids if wants_ids else answered.text
            turns = [*self._turns[previous], answer, sample.prompt]
            reply = Reply(
                answered.prompt_len + (answered.output_tokens or len(answered.texts)) + sample.prompt_len
            )
        self._turns[sample] = turns
        return turns, reply
