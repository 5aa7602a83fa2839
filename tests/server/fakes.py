"""A backend and an engine without a model: both answer with the prompt's ids reversed, then the end token."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil

from hex_llm.admission import Limits, check_request, make_request
from hex_llm.errors import InvalidRequest, QueueFull
from hex_llm.frontend.outputs import OutputCollector, for_engine
from hex_llm.frontend.requests import Generation, Room
from hex_llm.ipc.stats import Stats
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import FinishReason, Request, RequestOutput, TokenLogprobs, Update

BOS, EOS, FIRST_BYTE = 1, 2, 3
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
LIMITS = Limits(vocab_size=300, max_len=4096, max_blocks=1000, block_size=32, reads_text=True, eos_ids=(2,))
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

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.threads.add(threading.get_ident())
        return [BOS] * add_special_tokens + [FIRST_BYTE + byte for byte in text.encode()]

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        specials = {} if skip_special_tokens else {BOS: b"<s>", EOS: b"</s>"}
        known = FIRST_BYTE <= token_id < self.vocab_size
        return bytes([token_id - FIRST_BYTE]) if known else specials.get(token_id, b"")


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


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """That of a token is a thousandth of its id; the last of the likeliest has none at all."""
    top = list(range(num_top))
    return TokenLogprobs(
        -token_id / 1000, token_id + 1, top, [-i / 1000 for i in top[:-1]] + [float("-inf")] * bool(top)
    )


class FakeBackend:
    """`hold` keeps answers back until it is set; `error` is raised instead of answering.

    Between updates the others get `num_turns` turns: with many, a reader gets each update by itself.
    """

    model_name = "fake"
    max_len = LIMITS.longest
    max_sequences = 4096
    num_turns = 1

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
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> AsyncIterator[Generation]:
        if self.error is not None:
            raise self.error
        if isinstance(prompt, str) and self.tokenizer is None:
            raise InvalidRequest("prompt: this server has no tokenizer", "prompt")
        ids = self.tokenizer.encode(prompt) if self.tokenizer and isinstance(prompt, str) else list(prompt)
        request = make_request(
            f"fake-{len(self.asked)}", ids, params, LIMITS, self.tokenizer,
            priority=priority, cache_salt=cache_salt,
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

    async def complete(
        self, prompt: str | Sequence[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> RequestOutput:
        async with self.generate(prompt, params, priority=priority, cache_salt=cache_salt) as generation:
            await generation.until_end()
        return generation.output()


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


class FakeEngine:
    """As the worker knows an engine. Each step gives every open choice a token; `journal` tells the rest."""

    memory = "memory: none"

    def __init__(
        self,
        journal: Path | None = None,
        *,
        step_s: float = 0.0,
        max_requests: int = 1000,
        is_compiling: bool = False,
        max_sequences: int = LIMITS.max_sequences,
    ) -> None:
        self.limits = replace(LIMITS, max_sequences=max_sequences)
        self.num_steps = 0
        self.is_compiling = is_compiling
        self._journal = journal
        self._step_s = step_s
        self._max_requests = max_requests
        self._open: dict[tuple[str, int], list[Update]] = {}
        self._ends: list[Update] = []
        self._begun: list[tuple[str, float]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._ends)

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
        return updates

    def _end(self, key: tuple[str, int], reason: FinishReason) -> None:
        del self._open[key]
        self._ends.append(Update(*key, finish_reason=reason))

    def _note(self, event: str) -> None:
        if self._journal is not None:
            with self._journal.open("a") as file:
                file.write(event + "\n")


def seconds_until_gone(processes: Iterable[psutil.Process], limit_s: float = 5) -> float:
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


def fake_worker(load: str) -> list[str]:
    """A command that runs a real worker around `load`, Python that gives the loader's result."""
    script = (
        "import sys, time; from pathlib import Path; from hex_llm.errors import *;"
        "from hex_llm.engine.worker import main; from tests.server.fakes import FakeEngine\n"
        "def fail(error): raise error\n"
        f"sys.exit(main(Path(sys.argv[1]), lambda config: {load}))"
    )
    return [sys.executable, "-c", script]
