"""Structured outputs: which tokens may come next, so that the text conforms to what a request wants.

llguidance does the matching. A grammar is tried out in another process first (`grammar_trial.py`), and only
what passed there is compiled here. Most pass in no time; those that do not get a second trial that is longer,
in another line, so that they hold up nobody else. What was compiled is kept for those who ask again.
Not known here: requests, sampling, the model.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from hashlib import sha256

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from hex_llm.errors import HexError, InvalidRequest, QueueFull, one_line
from hex_llm.sampling_params import MAX_GRAMMAR, StructuredOutputs
from hex_llm.text.grammar_trial import LIMITS, NICENESS, Answer, Trial
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.text.vocabulary import Vocabulary

Mask = npt.NDArray[np.int32]

QUICK_SECONDS, TRIAL_SECONDS = 0.1, 2.0  # for compiling and one mask; then as long again here
MAX_SLOW = 4  # grammars that take longer and wait for their second trial; more are turned away
KEPT_BYTES = 64 << 20  # of compiled grammars
REFUSAL_BYTES, REFUSED_S = 1024, 60.0  # what a refusal counts for, and how long it is remembered
# The time of a processor that following its grammar may take a request in all, whatever its choices.
FOLLOW_SECONDS, FOLLOW_SECONDS_PER_TOKEN = 1.0, 0.01
_PARAM = "structured_outputs"


def give_way(niceness: int) -> None:
    """The calling thread runs after those that do not give way."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


def _begin(trial: Trial) -> None:
    """In the thread of this trial, before it gives way: the first grammar waits for the start."""
    with contextlib.suppress(OSError):  # whoever asks tries again
        trial.start()
    give_way(NICENESS)


@dataclass(eq=False)
class Compiled:
    """A grammar at its start."""

    inner: LLMatcher
    mask: Mask
    num_bytes: int

    def matcher(self, vocabulary: Vocabulary) -> Matcher:
        return Matcher(self.inner.deep_copy(), vocabulary, self.mask, Budget())


@dataclass(eq=False)
class _Entry:
    """What is known of one grammar, and who waits for it."""

    wanted: StructuredOutputs
    waiting: list[Future[Matcher]] = field(default_factory=list)
    outcome: Compiled | HexError | None = None  # None: not known yet
    until: float = math.inf  # which a refusal is remembered

    @property
    def num_bytes(self) -> int:
        return self.outcome.num_bytes if isinstance(self.outcome, Compiled) else REFUSAL_BYTES

    def tell(self, future: Future[Matcher], vocabulary: Vocabulary) -> None:
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            if isinstance(self.outcome, Compiled):
                future.set_result(self.outcome.matcher(vocabulary))
            else:
                future.set_exception(self.outcome)


class GrammarFactory:
    """Makes matchers for one model; any thread may call it. The processes start when they are needed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`vocab_size` is the width of the logits. With a large one this holds the GIL for a second or two,
        so it is done before there are requests; a tokenizer that cannot be used is refused to these."""
        vocabulary = Vocabulary.of(tokenizer, vocab_size, eos_ids)
        self._vocabulary = vocabulary
        if vocabulary is None:
            return
        self._table = vocabulary.table()
        self._lock = threading.Lock()
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the longest unused first
        self.num_bytes = 0  # of all entries that are done
        self.num_slow = 0  # that wait for their second trial
        self.quick, self.slow = (Trial(vocabulary, seconds) for seconds in (QUICK_SECONDS, TRIAL_SECONDS))
        self._threads = {
            trial: ThreadPoolExecutor(1, "grammar", _begin, (trial,)) for trial in (self.quick, self.slow)
        }

    def submit(self, wanted: StructuredOutputs) -> Future[Matcher]:
        """Returns at once. InvalidRequest: it is at fault; QueueFull: too many that take long are waiting."""
        done: Future[Matcher] = Future()
        try:
            _check(wanted)
            if self._vocabulary is None:
                raise InvalidRequest.at(_PARAM, "not supported with this model's kind of tokenizer")
        except InvalidRequest as error:
            done.set_exception(error)
            return done
        key = sha256(msgspec.json.encode(wanted)).digest()
        with self._lock:
            entry = self.entries.get(key)
            if entry is None or entry.until < time.monotonic():
                self._forget(key)
                entry = self.entries[key] = _Entry(wanted)
                self._threads[self.quick].submit(self._try, key, entry, self.quick)
            self.entries.move_to_end(key)
            if entry.outcome is None:
                entry.waiting.append(done)
                return done
        entry.tell(done, self._vocabulary)
        return done

    def close(self) -> None:
        """Ends the threads and the processes."""
        if self._vocabulary is None:
            return
        for trial, thread in self._threads.items():
            thread.shutdown(wait=False, cancel_futures=True)
            if trial.process is not None:
                trial.process.kill()
            thread.shutdown()
            trial.close()

    def _try(self, key: bytes, entry: _Entry, trial: Trial) -> None:
        """In the thread of this trial."""
        assert self._vocabulary is not None
        with self._lock:
            self.num_slow -= trial is self.slow
            if all(one.cancelled() for one in entry.waiting):
                self._forget(key)
                return
        try:
            answer = trial.ask(entry.wanted)
            if "late" in answer and trial is self.quick:
                self._try_slowly(key, entry)
                return
            entry.outcome = self._compile(entry.wanted, answer)
        except Exception as error:  # whatever it does to us, it ends those requests only
            entry.outcome = (
                error if isinstance(error, HexError) else HexError(f"{_PARAM}: {one_line(str(error))}")
            )
            entry.until = time.monotonic() + REFUSED_S * isinstance(error, InvalidRequest)
        with self._lock:
            waiting, entry.waiting = entry.waiting, []
            self._keep(entry)
        for one in waiting:
            entry.tell(one, self._vocabulary)

    def _try_slowly(self, key: bytes, entry: _Entry) -> None:
        with self._lock:
            if self.num_slow >= MAX_SLOW:
                raise QueueFull(
                    f"{_PARAM}: it takes long to compile, and {MAX_SLOW} others that do are waiting"
                )
            self.num_slow += 1
        self._threads[self.slow].submit(self._try, key, entry, self.slow)

    def _compile(self, wanted: StructuredOutputs, answer: Answer) -> Compiled:
        assert self._vocabulary is not None
        if "late" in answer:
            raise _refused(wanted, f"too complex: it takes more than {TRIAL_SECONDS:g} s to compile")
        if "lark" not in answer:
            raise _refused(wanted, answer["refusal"])
        inner = LLMatcher(self._table, answer["lark"], log_level=0, limits=LIMITS)
        mask = np.frombuffer(inner.compute_bitmask(), np.int32)[: len(self._vocabulary.known)]
        if inner.is_error():
            raise _refused(wanted, inner.get_error())
        return Compiled(inner, mask & self._vocabulary.known, answer["bytes"] + mask.nbytes)

    def _keep(self, entry: _Entry) -> None:
        """Where there is no room, the longest unused are forgotten."""
        self.num_bytes += entry.num_bytes
        for key, one in list(self.entries.items()):
            if self.num_bytes <= KEPT_BYTES:
                return
            if one.outcome is not None:
                self._forget(key)

    def _forget(self, key: bytes) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None and entry.outcome is not None:
            self.num_bytes -= entry.num_bytes


@dataclass(eq=False)
class Budget:
    """The time that following a grammar may still take one request, and what it has taken, of a processor."""

    seconds_left: float = FOLLOW_SECONDS
    seconds_taken: float = 0.0


class Matcher:
    """How far one sequence has come. InvalidRequest: it cannot be followed further. One thread at a time."""

    def __init__(self, inner: LLMatcher, vocabulary: Vocabulary, mask: Mask | None, budget: Budget) -> None:
        """`mask` is that of where it stands, if it is known; `budget` is that of the whole request."""
        self._inner, self._vocabulary = inner, vocabulary
        self._mask, self.budget = mask, budget

    def copy(self) -> Matcher:
        """For another choice of the same request that has come equally far."""
        return Matcher(self._inner.deep_copy(), self._vocabulary, self._mask, self.budget)

    def mask(self) -> Mask:
        """Bit i of word w: token 32 * w + i may come next. The ends of a text may where it is complete."""
        if self._mask is None:
            with self._watched():
                allowed = np.frombuffer(self._inner.compute_bitmask(), np.int32)
            self._mask = allowed[: len(self._vocabulary.known)] & self._vocabulary.known
        return self._mask

    def accept(self, token_id: int) -> bool:
        """False, and nothing has changed: the token does not conform."""
        if not self._vocabulary.knows(token_id):
            return False
        if self.stopped:
            return token_id in self._vocabulary.eos_ids
        known, self._mask = self._mask, None  # whoever cannot go on has none
        with self._watched():
            accepted: bool = self._inner.try_consume_tokens([token_id]) == 1
        if not accepted:
            self._mask = known
        else:
            self.budget.seconds_left += FOLLOW_SECONDS_PER_TOKEN
        return accepted

    @property
    def stopped(self) -> bool:
        """Nothing may follow but the end."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._check()
        begin = time.thread_time()
        yield
        taken = time.thread_time() - begin
        self.budget.seconds_left -= taken
        self.budget.seconds_taken += taken
        self._check()

    def _check(self) -> None:
        reason = "it takes too long" if self.budget.seconds_left < 0 else self._inner.get_error()
        if reason:  # a mask would be that of an end
            raise InvalidRequest.at(_PARAM, f"too complex to be followed further ({_shortened(reason)})")


# ---- refusals


def _check(wanted: StructuredOutputs) -> None:
    """Of one text StructuredOutputs has refused it already."""
    if sum(map(len, wanted.choice)) > MAX_GRAMMAR:
        raise _refused(wanted, f"more than {MAX_GRAMMAR} characters in all")


def _refused(wanted: StructuredOutputs, reason: str) -> InvalidRequest:
    kind = next(name for name, value in asdict(wanted).items() if value)
    if kind != "grammar":  # a place in our Lark
        reason = re.sub(r"^(at )?\d+\(\d+\): ", "", reason)
    return InvalidRequest(f"{_PARAM}.{kind}: {_shortened(reason)}", _PARAM)


def _shortened(reason: str) -> str:
    """One line without excerpts, of which both ends are kept: the fault is named at the one or the other."""
    if reason.startswith("NoExtension"):
        return "no text conforms to it"
    if reason.startswith("panic") or "limits." in reason:
        return "too complex"
    lines = [line for line in reason.splitlines() if not re.match(r"\s*\d+ \| |\s*\^+\s*$", line)]
    text = one_line(" ".join(" ".join(lines).removesuffix("<non-verbose/>").split()))
    return text if len(text) <= 300 else f"{text[:150]} ... {text[-150:]}"
