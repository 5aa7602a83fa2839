"""Engine: a book of requests, and who steps it. Knows token ids, not text; one thread calls it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import zmq

from hex_llm.admission import Limits
from hex_llm.config import EngineConfig
from hex_llm.engine.adapters import AdapterPool
from hex_llm.engine.book import Choice, RequestBook
from hex_llm.errors import EngineStopped
from hex_llm.execution.batch import Ints
from hex_llm.execution.flops import Work
from hex_llm.execution.leading import follow
from hex_llm.execution.results import Choices
from hex_llm.execution.runner import CompiledLate, Runner, is_there
from hex_llm.execution.step_runner import InFlight, StepRunner
from hex_llm.ipc.stats import Stats
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.hosts import gathered
from hex_llm.parallel.links import Follower, Leader
from hex_llm.sampling_params import MAX_LOGPROBS
from hex_llm.scheduling.blocks import BlockPool
from hex_llm.scheduling.limits import StepTimes
from hex_llm.scheduling.scheduler import Scheduler
from hex_llm.scheduling.sequence import Sequence
from hex_llm.text.grammar import GrammarFactory
from hex_llm.types import Chunk, Pooling, Request, StepPlan, TokenLogprobs, Update

Watched = zmq.Socket[bytes] | int  # a socket, or a file by its number
MIN_WAITED_S = 2e-4  # for a step; if it is waited for less, the host may have come too late
# Behind a step with prompts the next is scheduled late, so that who comes meanwhile is in it: so much before
# the end that is forecast, of which a share is believed. Being too late, or not, multiplies it by these.
LEAD_S = 0.005
LATE, IN_TIME = 0.95, 1.001


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        runner: Runner,
        num_blocks: int,
        grammars: GrammarFactory | None = None,
        pooling: Pooling | None = None,
        hosts: Leader | Follower | None = None,
        stepper: Stepping | None = None,
    ) -> None:
        """`hosts`: the link with the other hosts of the replica, if there are any. `stepper`: if not one for
        this runner."""
        self.config, self.spec, self.runner, self.hosts = config, spec, runner, hosts
        self.stepper = stepper or Stepper(config, spec, runner, num_blocks)
        self.limits = Limits(
            spec.vocab_size,
            spec.max_len,
            min(one.scheduler.pool.num_usable for one in self.stepper.steppers),
            config.block_size,
            grammars is not None,
            runner.paddings.limits.max_sequences,
            tuple(spec.eos_ids),
            config.allow_priority,
            replace(pooling or Pooling(), size=spec.hidden_size),
            config.runner in ("auto", "generate"),
            spec.vocab_size if config.max_logprobs == -1 else config.max_logprobs,
            config.max_loras if config.enable_lora else 0,
        )
        runners = [one.runner for one in self.stepper.steppers]
        layout = runner.adapter_layout
        adapters = None if layout is None else AdapterPool(config, layout, runners)
        self.book = RequestBook(spec, self.limits, grammars, config.seed, adapters)
        self.memory = ""  # where it goes, in words, if who loaded the engine has noted it

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every shape that a step can have, and finds out how long steps take."""
        # A program that other hosts do not run yet would wait for them.
        meet = tuple if self.hosts is None else partial(gathered, b"")
        for stepper in self.stepper.steppers:
            stepper.note_times(stepper.runner.warm_up(progress, meet))

    def add(self, request: Request) -> None:
        """Accepts a request; raises InvalidRequest or QueueFull, and nothing was accepted then."""
        self.book.add(request, self.stepper.scheduler)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; one that has ended, or never was, is ignored."""
        self.book.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        """Ends one choice as if it had come to a stop token: the reader of its text found a stop string."""
        self.book.stop(request_id, index)

    def step(self) -> list[Update]:
        """Sends the next step off, reads the one before it, and tells what that brought."""
        self.book.begin_prepared()
        if self.book.num_held:
            self.book.take_masks()
        if not (self.stepper.step(self.book) or self.book.has_updates):
            self.book.wait()
        return self.book.take_updates()

    def follow(self, frame: bytes) -> None:
        """Does as the leader's engine, on one of the other hosts."""
        follow(self.runner, frame)

    def tend(self) -> None:
        """Takes in what groups elsewhere tell; one that is lost ends its requests, and is started again."""
        self.stepper.tend(self.book)

    @property
    def watched(self) -> list[Watched]:
        """What tells that `tend` has something to do, for who polls."""
        return self.stepper.watched

    def close(self) -> None:
        """Ends what runs elsewhere for it."""
        self.stepper.close()
        if self.hosts is not None:
            self.hosts.close()

    @property
    def has_work(self) -> bool:
        return self.book.has_work or self.stepper.is_in_flight

    @property
    def is_compiling(self) -> bool:
        """Any thread may ask."""
        return any(one.runner.is_compiling for one in self.stepper.steppers)

    @property
    def patience_s(self) -> float:
        """So long `step` had better wait for news."""
        return self.stepper.patience_s

    @property
    def num_steps(self) -> int:
        return self.stepper.num_steps

    @property
    def stats(self) -> Stats:
        """After the last step."""
        stats = self.stepper.stats
        stats.num_waiting += self.book.num_preparing
        stats.running_adapters, stats.waiting_adapters = self.book.adapters()
        return stats

    def check(self) -> None:
        """The invariants that hold between any two calls (blocks, slots, and the ledger of requests)."""
        schedulers = [one.scheduler for one in self.stepper.steppers]
        for scheduler in schedulers:
            scheduler.check()
            assert self.has_work or scheduler.is_idle
        self.book.check(sum(one.num_waiting + len(one.running) for one in schedulers))

    def check_idle(self) -> None:
        """A part of these that takes no time to speak of, for an engine that has nothing to do."""
        self.book.check_idle()
        for one in self.stepper.steppers:
            one.scheduler.check_idle()


class Stepping(Protocol):
    """What an engine asks of who steps its runners."""

    @property
    def steppers(self) -> list[Stepper]:
        """All that there are."""

    @property
    def scheduler(self) -> Scheduler:
        """For the next request."""

    def step(self, book: RequestBook) -> bool:
        """Sends off and reads what can be; False: there was nothing to do."""

    @property
    def is_in_flight(self) -> bool:
        """A step was sent off and not read yet."""

    @property
    def patience_s(self) -> float:
        """So long the next step had better not be scheduled yet."""

    def tend(self, book: RequestBook) -> None: ...

    @property
    def watched(self) -> list[Watched]: ...

    def close(self) -> None: ...

    @property
    def num_steps(self) -> int: ...

    @property
    def stats(self) -> Stats:
        """After the last step."""


class Stepper:
    """Steps one runner: schedules, writes slots, sends off, reads, and tells a book of requests what came.

    Steps overlap: one is sent off before the one before it is read (--async_scheduling).
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec, runner: StepRunner, num_blocks: int) -> None:
        self.config, self.runner = config, runner
        pool = BlockPool(num_blocks, config.block_size, runner.kv_dtype)
        self.scheduler = Scheduler(pool, runner.paddings.limits)
        self.num_steps = 0
        self._in_flight: deque[tuple[InFlight, list[Sequence]]] = deque()
        self._work, self._num_flops, self._num_padding = Work.of(spec), 0.0, 0
        self._step = Stats()  # what the present step has noted so far
        # Since then the devices do the oldest step in flight, and it alone.
        self._busy_since: float | None = None
        # Until when the next one is not scheduled, if that has prompts; and the share of forecasts.
        self._patient_until: float | None = None
        self._share = 1.0

    def step(self, book: RequestBook) -> bool:
        """Sends the next step off and reads the one before it; False: there was nothing to do."""
        had_patience = self._patient_until is not None  # with a step before the one that is sent now
        sent = self.send_next(book)
        if had_patience:
            self._share = min(self._share * (LATE if self.can_read else IN_TIME), 1.0)
        if len(self._in_flight) > (self.config.async_scheduling if sent else 0):
            self.read_next(book)
            return True
        return sent

    @property
    def steppers(self) -> list[Stepper]:
        return [self]

    @property
    def is_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def patience_s(self) -> float:
        until = self._patient_until
        if until is None or len(self._in_flight) != self.config.async_scheduling or self.can_read:
            return 0.0
        return until - time.perf_counter()

    def tend(self, book: RequestBook) -> None:
        """There is nothing elsewhere."""

    @property
    def watched(self) -> list[Watched]:
        return []

    def close(self) -> None:
        pass

    def note_times(self, measured: dict[int, float]) -> None:
        """How long steps take, if that was measured."""
        self.scheduler.times = StepTimes(measured) if measured else None

    def lose(self, book: RequestBook, error: Exception) -> None:
        """All that the runner's devices held is gone: who runs here ends with the error."""
        for sequence in list(self.scheduler.running):
            book.fail(sequence, error)
        while self._in_flight:
            self.scheduler.abandon(self._in_flight.popleft()[1])
        self.scheduler.pool.forget()
        self._busy_since = self._patient_until = None

    @property
    def can_send(self) -> bool:
        """No more are in flight than may be while another is sent off."""
        return len(self._in_flight) <= self.config.async_scheduling

    @property
    def can_read(self) -> bool:
        """The oldest step in flight has ended: reading it takes no time."""
        return bool(self._in_flight) and is_there(self._in_flight[0][0].choices)

    def send_next(self, book: RequestBook) -> bool:
        """Sends the next step off; False: there was none."""
        self._step = Stats()
        with self._timed("schedule_s"), self.runner.recorder.phase("schedule"):
            plan, sequences = self.scheduler.schedule()
        if sequences:
            self._send_off(book, plan, sequences)
        return bool(sequences)

    def read_next(self, book: RequestBook) -> None:
        """Waits for the oldest step in flight and tells the book what it brought."""
        step, sequences = self._in_flight.popleft()
        try:
            with self._timed("wait_s"):
                chosen = self.runner.read(step)
        except CompiledLate as error:
            for sequence in sequences:
                book.fail(sequence, error)
            self.scheduler.abandon(sequences)
            return
        self._note_time(step)
        with self.runner.recorder.phase("tell"):
            self._keep_prompt_logprobs(book, step, sequences)
            if any(sequence.params.pooling for sequence in sequences):
                self._keep_pooled(book, step, sequences)
            for row, token_ids in self.scheduler.collect(step.plan, sequences, chosen.token_ids):
                sequence = sequences[row]
                if sequence.params.logprobs is None or not token_ids:
                    book.tell(sequence, token_ids, [])
                    continue
                with book.failing(sequence):
                    book.tell(sequence, token_ids, self._logprobs(book, step, row, sequence, chosen))

    @property
    def stats(self) -> Stats:
        """After the last step."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return msgspec.structs.replace(
            self._step,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_late_compiles=self.runner.num_late_compiles,
            num_padding=self._num_padding,
            num_flops=self._num_flops / self.config.tensor_parallel_size,
        )

    def _note_time(self, step: InFlight) -> None:
        """A step was read just now. How long it took is known if the host was there when it ended and when
        the one before it did, and if it was ready to begin then."""
        now, times, waited = time.perf_counter(), self.scheduler.times, self._step.wait_s > MIN_WAITED_S
        if times is not None and self._busy_since is not None and waited:
            times.observe(step.plan, step.shape.num_tokens, now - self._busy_since)
        self._busy_since = now if self._in_flight and waited else None
        self._note_begin(self._busy_since)

    def _note_begin(self, began: float | None) -> None:
        """Of the oldest step in flight, if it is known."""
        times, self._patient_until = self.scheduler.times, None
        if times is None or began is None:
            return
        step, _ = self._in_flight[0]
        if step.plan.prefills:
            seconds = times.expected(step.plan, step.shape.num_tokens)
            self._patient_until = began + self._share * seconds - LEAD_S

    def _send_off(self, book: RequestBook, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Who fails on the way is taken out of the step: it would compute from what its slot held before."""
        try:
            with self._timed("dispatch_s"):
                self._write_slots(book, plan, sequences)
                plan, sequences = self.scheduler.drop_ended(plan, sequences)
                if not sequences:
                    return
                assert all(sequence.slot_is_written for sequence in sequences)
                sent = self.runner.dispatch(plan)
            self._in_flight.append((sent, sequences))
            if len(self._in_flight) == 1:
                self._note_begin(time.perf_counter())
            self.num_steps += 1
            self._step.num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
            self._num_padding += sent.shape.num_tokens - self._step.num_tokens
            self._num_flops += self._work.in_step(plan.chunks)
        except CompiledLate as error:
            for sequence in sequences:
                book.fail(sequence, error)
            self.scheduler.drop_ended(plan, sequences)

    def _write_slots(self, book: RequestBook, plan: StepPlan, sequences: list[Sequence]) -> None:
        """What the devices are told about sequences."""
        records: list[tuple[int, Ints]] = []
        words: list[tuple[int, Ints]] = []
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            choice = book.choice_of(sequence)
            assert choice is not None, "who has ended is in no new step"
            if sequence.slot_is_written and not choice.constraint.is_needed:
                continue  # as most rows of most steps
            with book.failing(sequence):
                if not sequence.slot_is_written:
                    if (waited_s := book.note_begin(sequence)) is not None:
                        self._step.waited.append((sequence.request_id, waited_s))
                    records.append((chunk.slot, self._record(choice)))
                    sequence.slot_is_written = True
                elif chunk.samples:
                    changed = choice.constraint.changed_words(sequence.token_ids, chunk.end)
                    if changed is not None:
                        words.append((chunk.slot, changed))
        self.runner.write_slots(records)
        self.runner.write_allowed(words)

    def _record(self, choice: Choice) -> Ints:
        sequence, constraint = choice.sequence, choice.constraint
        allowed = constraint.words(sequence.token_ids, sequence.length) if constraint.is_needed else None
        num_prompt = len(sequence.prompt_ids)
        return self.runner.layout.record(
            sequence.params,
            choice.seed,
            num_prompt,
            sequence.token_ids,
            sequence.blocks,
            allowed,
            choice.adapter,
        )

    def _logprobs(
        self, book: RequestBook, step: InFlight, row: int, sequence: Sequence, chosen: Choices
    ) -> list[TokenLogprobs]:
        """Of the token that was chosen for a row. What the step itself does not tell is rare."""
        num_top, ids = sequence.params.logprobs or 0, sequence.params.logprob_token_ids
        told = chosen.logprobs(row, 1, num_top)
        choice = book.choice_of(sequence)
        if choice is None or not (ids or num_top > MAX_LOGPROBS):
            return told
        [token_id] = chosen.token_ids[row]
        last = sum(chunk.num_tokens for chunk in step.plan.chunks[: row + 1]) - 1
        hidden = self.runner.hidden(step, np.array([last]), np.array([choice.adapter]))
        if not ids:
            return self.runner.logprobs_of(hidden, np.array([token_id], np.int32), num_top, choice.adapter)
        labels = np.array(ids, np.int32)
        of_ids = self.runner.logprobs_of(hidden.repeat(len(ids), 0), labels, 0, choice.adapter)
        return [TokenLogprobs(told[0].logprob, told[0].rank, list(ids), [one.logprob for one in of_ids])]

    def _keep_prompt_logprobs(self, book: RequestBook, step: InFlight, sequences: list[Sequence]) -> None:
        for row in range(len(step.plan.decodes), len(sequences)):
            sequence, chunk = sequences[row], step.plan.chunks[row]
            num_top, prompt = sequence.params.prompt_logprobs, sequence.prompt_ids
            # Only one choice tells them, and not again when it is computed anew after a preemption.
            if num_top is None or sequence.index > 0 or len(sequence.token_ids) > len(prompt):
                continue
            if (choice := book.choice_of(sequence)) is not None:
                following = np.array(prompt[chunk.position + 1 : chunk.end + 1], np.int32)
                with book.failing(sequence):
                    logprobs = self.runner.prompt_logprobs(step, row, following, num_top, choice.adapter)
                    choice.prompt_logprobs[chunk.position :] = logprobs

    def _keep_pooled(self, book: RequestBook, step: InFlight, sequences: list[Sequence]) -> None:
        wanted, end = [], 0
        for chunk, sequence in zip(step.plan.chunks, sequences, strict=True):
            tokens, end = range(end, end + chunk.num_tokens), end + chunk.num_tokens
            own, choice = pooled_tokens(sequence.params.pooling, chunk, tokens), book.choice_of(sequence)
            if own and choice is not None:
                wanted.append((sequence, choice, chunk, own))
        if not wanted:
            return
        places = np.concatenate([list(own) for *_, own in wanted])
        adapters = np.concatenate([[choice.adapter] * len(own) for _, choice, _, own in wanted])
        try:
            hidden = self.runner.hidden(step, places, adapters)
        except EngineStopped as error:  # its devices are elsewhere, and gone
            for sequence in sequences:
                book.fail(sequence, error)
            return
        parts = np.split(hidden, np.cumsum([len(own) for *_, own in wanted])[:-1])
        for (sequence, choice, chunk, _), states in zip(wanted, parts, strict=True):
            kind = sequence.params.pooling
            if kind == "mean":  # what a preemption has left of an earlier sum does not count
                before = choice.pooled if chunk.position and choice.pooled is not None else 0
                total = before + states.sum(axis=0, dtype=np.float64)
                choice.pooled = total / chunk.end if chunk.samples else total
            elif kind == "tokens":
                ids = np.array(sequence.params.allowed_token_ids or (), np.int32)
                with book.failing(sequence):
                    logprobs = self.runner.logprobs_of(states.repeat(len(ids), 0), ids, 0, choice.adapter)
                    choice.pooled = np.array([one.logprob for one in logprobs])
            else:
                choice.pooled = states[0]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self._step, name, time.perf_counter() - started)


def pooled_tokens(kind: str | None, chunk: Chunk, tokens: range) -> range:
    """Those of a chunk's tokens whose hidden states such a pooling reads."""
    if kind == "mean":
        return tokens
    if kind == "cls":
        return tokens[:1] if chunk.position == 0 else range(0)
    return tokens[-1:] if kind and chunk.samples else range(0)
