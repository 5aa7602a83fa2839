"""A backend without a model, as tools/fake_engine.py's engine, whose names tests find here too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Unpack

import psutil

from hex_llm.admission import make_request
from hex_llm.config import EngineConfig
from hex_llm.errors import InvalidRequest, QueueFull
from hex_llm.frontend.outputs import OutputCollector, for_engine
from hex_llm.frontend.requests import Generation, Room
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import FinishReason, Request, RequestOptions, Update
from hex_llm.weights.adapter_source import AdapterNames
from tools.fake_engine import (  # noqa: F401
    BOS,
    EOS,
    FAILS_TO_ADD,
    FAILS_TO_STEP,
    FIRST_BYTE,
    HANGS,
    LIMITS,
    POOLING,
    TEMPLATE,
    ByteCodec,
    FakeEngine,
    byte_tokenizer,
    fake_logprobs,
    fake_vector,
    fake_worker,
    reversed_updates,
)

# A template with calls in Hermes' form, and a reply with two of them.
HERMES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# <tool_call> #}"
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"place": "Röm"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
)


class FakeBackend:
    """`hold` keeps answers back until it is set; `error` is raised instead of answering.

    Between updates the others get `num_turns` turns: with many, a reader gets each update by itself.
    """

    model_name = "fake"
    max_len = LIMITS.longest
    max_sequences = 4096
    pooling = POOLING
    num_turns = 1
    sampling_defaults: Mapping[str, Any] = {}
    adapters = AdapterNames(EngineConfig())

    def __init__(self, tokenizer: Tokenizer | None = None, *, ready: bool = True) -> None:
        self.ready = ready
        self.tokenizer = tokenizer
        self.asked: list[Request] = []
        self.num_cancelled = 0
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None

    def check_room(self, num_sequences: int) -> None:
        Room().check(num_sequences, self.max_sequences)
        if isinstance(self.error, QueueFull):
            raise self.error

    @asynccontextmanager
    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Generation]:
        if self.error is not None:
            raise self.error
        if isinstance(prompt, str) and self.tokenizer is None:
            raise InvalidRequest("prompt: this server has no tokenizer", "prompt")
        ids = self.tokenizer.encode(prompt) if self.tokenizer and isinstance(prompt, str) else list(prompt)
        request = make_request(
            f"fake-{len(self.asked)}", ids, params, replace(LIMITS, max_adapters=8), self.tokenizer, **options
        )  # fmt: skip
        self.asked.append(request)
        text = prompt if isinstance(prompt, str) else None
        generation = Generation(OutputCollector(request, self.tokenizer, text))
        feeding = asyncio.create_task(self._feed(generation))
        try:
            yield generation
        finally:
            self.num_cancelled += not generation.ended
            feeding.cancel()

    async def _feed(self, generation: Generation) -> None:
        await (self.hold.wait() if self.hold else asyncio.sleep(0))
        for update in self.updates(for_engine(generation.collector.request)):
            generation.add(update)
            for _ in range(self.num_turns):
                await asyncio.sleep(0)

    def updates(self, request: Request) -> Iterable[Update]:
        return reversed_updates(request)


class Speaker(FakeBackend):
    """Says `text` whatever it is asked, one byte at a time, in all choices at once; then it ends."""

    num_turns = 20

    def __init__(self, text: str, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(tokenizer or byte_tokenizer())
        self.text = text

    def updates(self, request: Request) -> Iterable[Update]:
        most = request.params.max_tokens or LIMITS.max_len
        said = [FIRST_BYTE + byte for byte in self.text.encode()][:most]
        for token_id in said:
            for index in range(request.params.num_choices):
                yield Update(request.request_id, index, [token_id])
        reason = FinishReason.LENGTH if len(said) == most else FinishReason.STOP
        for index in range(request.params.num_choices):
            yield Update(request.request_id, index, finish_reason=reason)


def seconds_until_gone(processes: Iterable[psutil.Process], limit_s: float = 10) -> float:
    """Zombies are gone: who must reap an orphan is none of ours."""
    started = time.monotonic()
    while any(map(_is_alive, processes)):
        assert time.monotonic() - started < limit_s, "processes are left"
        time.sleep(0.01)
    return time.monotonic() - started


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
