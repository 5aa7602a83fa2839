"""Engine: schedule, send off, read, tell. Knows token ids, not text; one thread calls it.

Every request that `add` accepts gets exactly one end, told by the last Update of each of its choices.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
import numpy as np

from hex_llm.admission import Limits, check_request, max_len_of, narrowing_field
from hex_llm.config import EngineConfig
from hex_llm.engine.constraints import Constraint, TokenRules
from hex_llm.engine.masks import MaskPool
from hex_llm.errors import InvalidRequest, QueueFull
from hex_llm.execution.batch import Ints
from hex_llm.execution.flops import Work
from hex_llm.execution.results import unpack_choice
from hex_llm.execution.runner import CompiledLate, InFlight, Runner
from hex_llm.ipc.stats import Stats
from hex_llm.models.spec import ModelSpec
from hex_llm.scheduling.blocks import BlockPool, root_key
from hex_llm.scheduling.scheduler import Scheduler, StepLimits
from hex_llm.scheduling.sequence import Sequence
from hex_llm.text.grammar import GrammarFactory, Matcher
from hex_llm.types import FinishReason, Request, StepPlan, TokenLogprobs, Update

GRAMMAR_S = 8.0  # what compiling a request's grammar may take, with the time that it waits for others
GRACE_S = 0.002  # what a step waits for masks; a choice whose mask takes longer sits steps out
POLL_S = 0.01  # what an engine waits at a time that has nothing to do but wait
NO_TOKEN = "the model gave no finite score to any token that is allowed"


@dataclass(eq=False)
class Choice:
    """One choice of a request: its sequence, and what the engine knows besides."""

    sequence: Sequence
    seed: int
    constraint: Constraint
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    next_mask: Future[Ints | None] | None = None  # while it is being made
    is_late: bool = False  # a step has waited for that mask


@dataclass(eq=False)
class ActiveRequest:
    """A request that has not ended."""

    request: Request
    choices: list[Choice] = field(default_factory=list)  # empty while its grammar is being compiled
    reasons: dict[int, FinishReason] = field(default_factory=dict)  # of the choices that have ended
    matcher: Future[Matcher] | None = None  # while it is being made
    added: float = field(default_factory=time.monotonic)
    has_begun: bool = False  # a step has taken it in


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        runner: Runner,
        num_blocks: int,
        grammars: GrammarFactory | None = None,
    ) -> None:
        self.config, self.spec, self.runner = config, spec, runner
        pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(pool, StepLimits.of(config, spec.max_len))
        self.limits = Limits(
            spec.vocab_size,
            spec.max_len,
            pool.num_usable,
            config.block_size,
            grammars is not None,
            config.max_sequences(spec.max_len),
            tuple(spec.eos_ids),
            config.allow_priority,
        )
        self.num_steps = 0
        self.memory = ""  # where it goes, in words, if who loaded the engine has noted it
        self.ledger: Counter[str] = Counter()  # accepted, and one of finished, aborted, error for each
        self._grammars = grammars
        self._masks = MaskPool()
        self._live: dict[str, ActiveRequest] = {}
        self._choices: dict[Sequence, Choice] = {}
        self._held: dict[Choice, None] = {}  # those whose masks are being made, in order
        self._in_flight: deque[tuple[InFlight, list[Sequence]]] = deque()
        self._updates: list[Update] = []
        self._num_padding = 0
        self._work, self._num_flops = Work.of(spec), 0.0
        self._step = Stats()  # what the present step has noted so far

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every shape that a step can have."""
        self.runner.warm_up(progress)

    # ---- requests

    def add(self, request: Request) -> None:
        """Accepts a request; raises InvalidRequest or QueueFull, and nothing was accepted then."""
        check_request(request, self.limits)
        if request.request_id in self._live:
            raise InvalidRequest("request_id: it is in use", "request_id")
        compiling = sum(live.request.params.num_choices for live in self._live.values() if not live.choices)
        self.scheduler.check_room(request.params.num_choices + compiling)
        live = ActiveRequest(request)
        if request.params.structured_outputs is None:
            self._begin(live, None)
        else:
            assert self._grammars is not None  # or it would have been refused
            live.matcher = self._grammars.submit(request.params.structured_outputs)
        self._live[request.request_id] = live
        self.ledger["accepted"] += 1

    def abort(self, request_id: str) -> None:
        """Ends a request at once; one that has ended, or never was, is ignored."""
        if live := self._live.get(request_id):
            self._end_all(live, FinishReason.ABORT)

    def stop(self, request_id: str, index: int) -> None:
        """Ends one choice as if it had come to a stop token: the reader of its text found a stop string."""
        live = self._live.get(request_id)
        if live and index < len(live.choices) and index not in live.reasons:
            self._end(live, index, FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight or self._updates)

    @property
    def is_compiling(self) -> bool:
        """Any thread may ask."""
        return self.runner.is_compiling

    # ---- the loop

    def step(self) -> list[Update]:
        """Sends the next step off, reads the one before it, and tells what that brought."""
        self._step = Stats()
        self._begin_compiled()
        if self._held:
            self._take_masks()
        with self._timed("schedule_s"), self.runner.recorder.phase("schedule"):
            plan, sequences = self.scheduler.schedule()
        if sequences:
            self._send_off(plan, sequences)
        if self._in_flight and len(self._in_flight) > (self.config.async_scheduling if sequences else 0):
            self._read(*self._in_flight.popleft())
        elif not (sequences or self._updates):
            self._wait()
        updates, self._updates = self._updates, []
        return updates

    @property
    def stats(self) -> Stats:
        """After the last step."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return msgspec.structs.replace(
            self._step,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting + self._step.num_waiting,
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

    def check(self) -> None:
        """The invariants that hold between any two calls (blocks, slots, and the ledger of requests)."""
        self.scheduler.check()
        ended = self.ledger["finished"] + self.ledger["aborted"] + self.ledger["error"]
        assert self.ledger["accepted"] == ended + len(self._live), f"a request is lost: {self.ledger}"
        open_choices = {
            c.sequence
            for live in self._live.values()
            for i, c in enumerate(live.choices)
            if i not in live.reasons
        }
        assert open_choices == set(self._choices)
        assert len(open_choices) == self.scheduler.num_waiting + len(self.scheduler.running)
        if not self.has_work:
            assert self.scheduler.is_idle

    def check_idle(self) -> None:
        """A part of these that takes no time to speak of, for an engine that has nothing to do."""
        assert len(self._live) + len(self._choices) == 0, "a request is lost"
        self.scheduler.check_idle()

    def _send_off(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Who fails on the way is taken out of the step: it would compute from what its slot held before."""
        try:
            with self._timed("dispatch_s"):
                self._write_slots(plan, sequences)
                plan, sequences = self.scheduler.drop_ended(plan, sequences)
                if not sequences:
                    return
                assert all(sequence.slot_is_written for sequence in sequences)
                sent = self.runner.dispatch(plan)
            self._in_flight.append((sent, sequences))
            self.num_steps += 1
            self._step.num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
            self._num_padding += sent.shape.num_tokens - self._step.num_tokens
            self._num_flops += self._work.in_step(plan.chunks)
        except CompiledLate as error:
            for sequence in sequences:
                self._fail(sequence, str(error))
            self.scheduler.drop_ended(plan, sequences)

    def _read(self, step: InFlight, sequences: list[Sequence]) -> None:
        with self._timed("wait_s"):
            chosen = self.runner.read(step)
        with self.runner.recorder.phase("tell"):
            self._keep_prompt_logprobs(step, sequences)
            for row in self.scheduler.collect(step.plan, sequences, chosen[:, 0].tolist()):
                self._tell(sequences[row], chosen[row])

    # ---- what the devices are told about sequences

    def _write_slots(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        records: list[tuple[int, Ints]] = []
        words: list[tuple[int, Ints]] = []
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            choice = self._choices[sequence]
            with self._failing(sequence):
                if not sequence.slot_is_written:
                    self._note_begin(self._live[sequence.request_id])
                    records.append((chunk.slot, self._record(choice)))
                    sequence.slot_is_written = True
                elif chunk.samples and choice.constraint.is_needed:
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
            sequence.params, choice.seed, num_prompt, sequence.token_ids, allowed
        )

    # ---- what came of a step

    def _tell(self, sequence: Sequence, chosen: Ints) -> None:
        choice, live = self._choices[sequence], self._live[sequence.request_id]
        if sequence.finish_reason is FinishReason.ERROR:
            self._end(live, sequence.index, FinishReason.ERROR, NO_TOKEN, narrowing_field(live.request))
            return
        token_id = sequence.token_ids[-1]
        update = Update(sequence.request_id, sequence.index, [token_id], num_cached=sequence.num_cached or 0)
        if sequence.params.logprobs is not None:
            update.logprobs = [unpack_choice(chosen, sequence.params.logprobs)]
        update.prompt_logprobs, choice.prompt_logprobs = choice.prompt_logprobs, []
        self._updates.append(update)
        if sequence.finish_reason is not None:
            if sequence.finish_reason is FinishReason.STOP and token_id not in self.spec.eos_ids:
                update.stop_token_id = token_id
            self._note_end(live, choice, sequence.finish_reason, update)
        elif choice.constraint.matcher is not None:
            self._follow(choice, token_id)

    def _follow(self, choice: Choice, token_id: int) -> None:
        """The choice sits out until the mask is there of what may follow the token."""
        assert choice.constraint.matcher is not None
        with self._failing(choice.sequence):
            choice.next_mask, choice.is_late = self._masks.submit(choice.constraint.matcher, token_id), False
            choice.sequence.is_held = True
            self._held[choice] = None

    def _take_masks(self) -> None:
        """Lets choices go on whose masks are there. Each is waited for a little while, once."""
        new = [choice.next_mask for choice in self._held if choice.next_mask and not choice.is_late]
        if new:
            wait(new, GRACE_S)
        for choice in list(self._held):
            choice.is_late = True
            if choice.sequence.finish_reason is not None:
                assert choice.next_mask is not None
                choice.next_mask.cancel()
                del self._held[choice]
            elif choice.next_mask is not None and choice.next_mask.done():
                del self._held[choice]
                self._take_mask(choice, choice.next_mask)

    def _take_mask(self, choice: Choice, made: Future[Ints | None]) -> None:
        choice.next_mask, choice.sequence.is_held = None, False
        with self._failing(choice.sequence):
            mask = made.result()
            if mask is None:
                live = self._live[choice.sequence.request_id]
                self._end(live, choice.sequence.index, FinishReason.STOP)
            else:
                choice.constraint.put_mask(mask)

    def _wait(self) -> None:
        """All that is left to do is done beside this thread: do not spin."""
        beside: list[Future[Any] | None] = [live.matcher for live in self._live.values()]
        beside += [choice.next_mask for choice in self._held]
        wait([one for one in beside if one is not None], POLL_S, "FIRST_COMPLETED")

    def _keep_prompt_logprobs(self, step: InFlight, sequences: list[Sequence]) -> None:
        for row in range(len(step.plan.decodes), len(sequences)):
            sequence, chunk = sequences[row], step.plan.chunks[row]
            wanted, prompt = sequence.params.prompt_logprobs, sequence.prompt_ids
            choice = self._choices.get(sequence)
            # Only one choice tells them, and not again when it is computed anew after a preemption.
            if (
                wanted is None
                or choice is None
                or sequence.index > 0
                or len(sequence.token_ids) > len(prompt)
            ):
                continue
            following = np.array(prompt[chunk.position + 1 : chunk.end + 1], np.int32)
            found = self.runner.prompt_logprobs(step, row, following, wanted)
            choice.prompt_logprobs[chunk.position :] = found

    # ---- what is told of the engine itself

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self._step, name, time.perf_counter() - started)

    def _note_begin(self, live: ActiveRequest) -> None:
        if not live.has_begun:
            live.has_begun = True
            self._step.waited.append((live.request.request_id, time.monotonic() - live.added))

    # ---- how requests begin and end

    def _begin(self, live: ActiveRequest, matcher: Matcher | None) -> None:
        request, params = live.request, live.request.params
        ends = not params.ignore_eos or params.structured_outputs is not None
        stop_ids = frozenset(params.stop_token_ids) | frozenset(self.spec.eos_ids if ends else ())
        seed, rules = self._seed(request), TokenRules(request, stop_ids, self.spec.vocab_size)
        choices: list[Choice] = []
        for index in range(params.num_choices):
            constraint = Constraint(rules, matcher.copy() if matcher and index else matcher)
            sequence = Sequence(
                request.request_id,
                request.prompt_ids,
                params,
                stop_ids,
                max_len_of(request, self.limits),
                index,
                request.priority,
                recompute_len=self.spec.recompute_len,
                # Who wants the prompt's log-probabilities needs all of it computed.
                cache_key=root_key(request.cache_salt) if params.prompt_logprobs is None else None,
                cache_len=self.spec.uniform_len,
                waits_for_tokens=constraint.follows_tokens,
            )
            choices.append(Choice(sequence, (seed + index) % 2**64, constraint))
        live.choices = choices  # all of them, or none
        for choice in choices:
            self._choices[choice.sequence] = choice
            self.scheduler.add(choice.sequence)

    def _seed(self, request: Request) -> int:
        """The request's own, or one that differs from request to request and follows from --seed."""
        if request.params.seed is not None:
            return request.params.seed % 2**64
        drawn = sha256(f"{self.config.seed} {self.ledger['accepted']}".encode()).digest()
        return int.from_bytes(drawn[:8])

    def _begin_compiled(self) -> None:
        """Lets requests run whose grammars are ready; ends those whose are not in time."""
        compiling = [live for live in self._live.values() if live.matcher is not None]
        for live in compiling:
            assert live.matcher is not None
            if live.matcher.done():
                made, live.matcher = live.matcher, None
                try:
                    self._begin(live, made.result())
                except Exception as error:  # whatever its grammar does to us, it ends that request only
                    is_busy = isinstance(error, QueueFull)
                    param = error.param if isinstance(error, InvalidRequest) else None
                    self._end_all(live, FinishReason.ERROR, str(error), param, is_busy=is_busy)
            elif time.monotonic() > live.added + GRAMMAR_S:
                message = f"structured_outputs: others that are compiled before it take over {GRAMMAR_S:g} s"
                self._end_all(live, FinishReason.ERROR, message, is_busy=True)
        self._step.num_waiting = sum(
            live.request.params.num_choices for live in compiling if live.matcher is not None
        )

    @contextmanager
    def _failing(self, sequence: Sequence) -> Iterator[None]:
        """An exception that a request's own data causes ends that request only."""
        try:
            yield
        except Exception as error:
            param = error.param if isinstance(error, InvalidRequest) else None
            self._fail(sequence, str(error) or type(error).__name__, param)

    def _fail(self, sequence: Sequence, message: str, param: str | None = None) -> None:
        live = self._live.get(sequence.request_id)
        if live is not None and sequence.index not in live.reasons:
            self._end(live, sequence.index, FinishReason.ERROR, message, param)

    def _end_all(
        self,
        live: ActiveRequest,
        reason: FinishReason,
        error: str = "",
        param: str | None = None,
        is_busy: bool = False,
    ) -> None:
        if live.matcher is not None:
            live.matcher.cancel()
        for index in range(live.request.params.num_choices):
            if index not in live.reasons:
                self._end(live, index, reason, error, param, is_busy)

    def _end(
        self,
        live: ActiveRequest,
        index: int,
        reason: FinishReason,
        error: str = "",
        param: str | None = None,
        is_busy: bool = False,
    ) -> None:
        """Ends a choice, told by an update of its own."""
        update = Update(live.request.request_id, index, error=error, param=param, is_busy=is_busy)
        self._updates.append(update)
        choice = live.choices[index] if live.choices else None
        if choice is not None and choice.sequence.finish_reason is None:
            self.scheduler.finish(choice.sequence, reason)
        self._note_end(live, choice, reason, update)

    def _note_end(
        self, live: ActiveRequest, choice: Choice | None, reason: FinishReason, update: Update
    ) -> None:
        update.finish_reason = reason
        live.reasons[update.index] = reason
        if choice is not None:
            del self._choices[choice.sequence]
        if len(live.reasons) == live.request.params.num_choices:
            del self._live[live.request.request_id]
            reasons = set(live.reasons.values())
            bad = {FinishReason.ERROR: "error", FinishReason.ABORT: "aborted"}
            self.ledger[next((name for r, name in bad.items() if r in reasons), "finished")] += 1
