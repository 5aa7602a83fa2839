"""A backend without a model, and an LLM without weights: both answer with the prompt's ids reversed."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

from hex_llm.errors import InvalidRequest
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, FinishReason, SamplingParams

BOS, EOS, FIRST_BYTE = 1, 2, 3
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class ByteCodec:
    """A token for each byte. Remembers the threads that it ran in."""

    vocab_size = 256 + FIRST_BYTE

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def token_id(self, token: str) -> int | None:
        return {"<s>": BOS, "</s>": EOS}.get(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        return [BOS] * add_special_tokens + [FIRST_BYTE + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.threads.add(threading.get_ident())
        specials = {} if skip_special_tokens else {BOS: b"<s>", EOS: b"</s>"}
        return b"".join(
            bytes([i - FIRST_BYTE]) if i >= FIRST_BYTE else specials.get(i, b"") for i in ids
        ).decode("utf-8", "replace")


def byte_tokenizer(chat_template: str | None = TEMPLATE, codec: ByteCodec | None = None) -> Tokenizer:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(codec or ByteCodec(), (EOS,), names, chat_template)


class FakeBackend:
    """`hold` keeps answers back until it is set; `error` is raised instead of answering."""

    model_name = "fake"
    max_len = 4096

    def __init__(self, tokenizer: Tokenizer | None = None, *, ready: bool = True) -> None:
        self.ready = ready
        self.tokenizer = tokenizer
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.num_cancelled = 0
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> CompletionOutput:
        if self.error is not None:
            raise self.error
        if not 0 < len(prompt_ids) < self.max_len:
            raise InvalidRequest("the prompt is empty or too long", "prompt")
        self.asked.append((list(prompt_ids), params))
        try:
            await (self.hold.wait() if self.hold else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return CompletionOutput(0, *reversed_output(prompt_ids, params))


def reversed_output(prompt_ids: Sequence[int], params: SamplingParams) -> tuple[list[int], str, FinishReason]:
    ids = [*reversed(prompt_ids), EOS]
    limit = len(ids) if params.max_tokens is None else params.max_tokens
    return ids[:limit], "", FinishReason.STOP if limit >= len(ids) else FinishReason.LENGTH


class FakeEngine:
    """One request runs, from step to step; the others wait. Remembers the threads that it ran in."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(max_len=64)
        self.scheduler = SimpleNamespace(waiting=deque())
        self.running: SimpleNamespace | None = None
        self.threads: set[int] = set()
        self.num_steps = 0
        self.may_step = threading.Event()
        self.may_step.set()
        self.error: Exception | None = None
        self.idle = False

    def prepare(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> SimpleNamespace:
        self.threads.add(threading.get_ident())
        if not prompt_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        return SimpleNamespace(
            request_id=request_id, prompt_ids=prompt_ids, params=params, output_ids=[], finish_reason=None
        )

    def add(self, sequence: SimpleNamespace) -> None:
        self.threads.add(threading.get_ident())
        self.scheduler.waiting.append(sequence)

    def step(self) -> list[SimpleNamespace]:
        self.threads.add(threading.get_ident())
        self.num_steps += 1
        if self.running is None:
            self.running = self.scheduler.waiting.popleft()
        self.may_step.wait()
        if self.error is not None:
            raise self.error
        if self.idle:
            return []
        sequence = self.running
        ids, _, reason = reversed_output(sequence.prompt_ids, sequence.params)
        sequence.output_ids.append(ids[len(sequence.output_ids)])
        if len(sequence.output_ids) == len(ids):
            sequence.finish_reason, self.running = reason, None
        return [sequence]


class FakeLLM:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.tokenizer = byte_tokenizer()
