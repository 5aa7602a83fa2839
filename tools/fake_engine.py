"""An engine without a model, in a real worker process: it says the ids of its prompt backwards, then the end.

For tests, and to measure all that stands before an engine.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hex_llm.admission import Limits, check_request
from hex_llm.errors import QueueFull
from hex_llm.ipc.stats import Stats
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import FinishReason, Pooling, Request, TokenLogprobs, Update

BOS, EOS, FIRST_BYTE = 1, 2, 3
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
POOLING = Pooling(size=8)
LIMITS = Limits(
    vocab_size=300,
    max_len=4096,
    max_blocks=1000,
    block_size=32,
    reads_text=True,
    eos_ids=(2,),
    pooling=POOLING,
)
# Prompts that begin with one of these make the FakeEngine fail.
FAILS_TO_ADD, FAILS_TO_STEP, HANGS = 290, 291, 292


class ByteCodec:
    """A token for each byte. Remembers the threads in which it encoded."""

    vocab_size = 256 + FIRST_BYTE
    prefix = ""
    longest = (1, b"")

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def token_id(self, token: str) -> int | None:
        return {"<s>": BOS, "</s>": EOS}.get(token)

    def token(self, token_id: int) -> str:
        return self.token_bytes(token_id, False).decode("latin-1")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        return [BOS] * add_special_tokens + [FIRST_BYTE + byte for byte in text.encode()]

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        specials = {} if skip_special_tokens else {BOS: b"<s>", EOS: b"</s>"}
        known = FIRST_BYTE <= token_id < self.vocab_size
        return bytes([token_id - FIRST_BYTE]) if known else specials.get(token_id, b"")


@cache
def byte_tokenizer(chat_template: str | None = TEMPLATE, codec: ByteCodec | None = None) -> Tokenizer:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(codec or ByteCodec(), (EOS,), names, chat_template)


def reversed_updates(request: Request) -> Iterator[Update]:
    """One token each. Choice i leaves out the first i tokens; the likeliest tokens are the lowest ids."""
    params = request.params
    most = min(params.max_tokens or LIMITS.max_len, LIMITS.max_len - len(request.prompt_ids))
    for index in range(params.num_choices):
        ids = [*reversed(request.prompt_ids), EOS][index:]
        if params.ignore_eos:
            ids = (ids[:-1] or [FIRST_BYTE]) * (most // max(len(ids) - 1, 1) + 1)
        for i, token_id in enumerate(ids[:most]):
            update = Update(request.request_id, index, [token_id], num_cached=len(request.prompt_ids) - 1)
            if params.pooling is not None:
                update.pooled = fake_vector(request.prompt_ids).tobytes()
            if params.logprobs is not None:
                update.logprobs = [fake_logprobs(token_id, params.logprobs)]
            if params.prompt_logprobs is not None and i == index == 0:
                wanted = params.prompt_logprobs
                update.prompt_logprobs = [fake_logprobs(p, wanted) for p in request.prompt_ids[1:]]
            if token_id in ((EOS,) if not params.ignore_eos else ()) + params.stop_token_ids:
                update.finish_reason = FinishReason.STOP
                update.stop_token_id = token_id if token_id in params.stop_token_ids else None
            elif i + 1 == most:
                update.finish_reason = FinishReason.LENGTH
            yield update
            if update.finish_reason is not None:
                break


def fake_vector(prompt_ids: list[int]) -> npt.NDArray[np.float32]:
    """How often ids have each of their remainders by the vector's size."""
    return np.bincount([i % POOLING.size for i in prompt_ids], minlength=POOLING.size).astype(np.float32)


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """That of a token is a thousandth of its id; the last of the likeliest has none at all."""
    top = list(range(num_top))
    return TokenLogprobs(
        -token_id / 1000, token_id + 1, top, [-i / 1000 for i in top[:-1]] + [float("-inf")] * bool(top)
    )


class FakeEngine:
    """As the worker knows an engine. Each step gives every open choice a token; `journal` tells the rest."""

    memory = "memory: none"
    hosts = None
    watched = ()

    def __init__(
        self,
        journal: Path | None = None,
        *,
        step_s: float = 0.0,
        max_requests: int = 1000,
        is_compiling: bool = False,
        max_sequences: int = LIMITS.max_sequences,
        patience_s: float = 0.0,
    ) -> None:
        self.limits = replace(LIMITS, max_sequences=max_sequences)
        self.num_steps = 0
        self.is_compiling = is_compiling
        self._journal = journal
        self._step_s, self._pause_s, self._stepped = step_s, patience_s, 0.0
        self._max_requests = max_requests
        self._open: dict[tuple[str, int], list[Update]] = {}
        self._ends: list[Update] = []
        self._begun: list[tuple[str, float]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._ends)

    @property
    def patience_s(self) -> float:
        return self._stepped + self._pause_s - time.perf_counter()

    @property
    def stats(self) -> Stats:
        begun, self._begun = self._begun, []
        return Stats(
            num_running=len(self._open), num_blocks=100, num_free_blocks=75, num_tokens=5, waited=begun
        )

    def add(self, request: Request) -> None:
        check_request(request, self.limits)
        if request.prompt_ids[0] == FAILS_TO_ADD:
            raise RuntimeError("at 0x7fffdeadbeef")
        if len({request_id for request_id, _ in self._open}) >= self._max_requests:
            raise QueueFull("too many requests")
        self._note("add")
        self._begun.append((request.request_id, 0.001))
        for update in reversed_updates(request):
            self._open.setdefault((request.request_id, update.index), []).append(update)

    def abort(self, request_id: str) -> None:
        self._note("abort")
        for key in [key for key in self._open if key[0] == request_id]:
            self._end(key, FinishReason.ABORT)

    def stop(self, request_id: str, index: int) -> None:
        self._note(f"stop {index}")
        if (request_id, index) in self._open:
            self._end((request_id, index), FinishReason.STOP)

    def check_idle(self) -> None:
        assert not self.has_work

    def tend(self) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self) -> list[Update]:
        self.num_steps += 1
        time.sleep(self._step_s)
        updates, self._ends = self._ends, []
        for key, left in list(self._open.items()):
            updates.append(left.pop(0))
            if not left:
                del self._open[key]
        for token_id in {i for update in updates for i in update.token_ids}:
            if token_id == FAILS_TO_STEP:
                raise RuntimeError("device lost\nat 0x7fffdeadbeef")
            if token_id == HANGS:
                time.sleep(3600)
        if not self.has_work:
            self._note("idle")
        self._stepped = time.perf_counter()
        return updates

    def _end(self, key: tuple[str, int], reason: FinishReason) -> None:
        del self._open[key]
        self._ends.append(Update(*key, finish_reason=reason))

    def _note(self, event: str) -> None:
        if self._journal is not None:
            with self._journal.open("a") as file:
                file.write(event + "\n")


def fake_worker(load: str) -> list[str]:
    """A command that runs a real worker around `load`, Python that gives the loader's result."""
    script = (
        "import sys, time; from pathlib import Path; from hex_llm.errors import *;"
        "from hex_llm.engine.worker import main; from tools.fake_engine import FakeEngine\n"
        "def fail(error): raise error\n"
        f"sys.exit(main(Path(sys.argv[1]), lambda config: {load}))"
    )
    return [sys.executable, "-c", script]
