"""The book of requests: who they are, what they wait for, and how each of them ends. It runs nothing itself.

Every request that `add` accepts gets exactly one end, told by the last Update of each of its choices. Its
sequences wait with the scheduler that it was added for: several steppers, each with its own, can feed on one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hex_llm.admission import Limits, check_request, max_len_of, narrowing_field
from hex_llm.engine.adapters import AdapterPool, Slot
from hex_llm.engine.constraints import Constraint, TokenRules
from hex_llm.engine.masks import MaskPool
from hex_llm.errors import EngineStopped, InvalidRequest, QueueFull, UnknownModel
from hex_llm.execution.adapters import HostAdapter
from hex_llm.execution.batch import Ints
from hex_llm.execution.step_runner import StepRunner
from hex_llm.models.spec import ModelSpec
from hex_llm.scheduling.blocks import root_key
from hex_llm.scheduling.scheduler import Scheduler
from hex_llm.scheduling.sequence import Sequence
from hex_llm.text.grammar import GrammarFactory, Matcher
from hex_llm.types import FinishReason, Request, TokenLogprobs, Update

GRAMMAR_S = 8.0  # what compiling a request's grammar may take, with the time that it waits for others
GRACE_S = 0.002  # what a step waits for masks; a choice whose mask takes longer sits steps out
PATIENCE_S = 2.0  # after which who waits for a slot is not passed any more by those whose adapters have one
POLL_S = 0.01  # what an engine waits at a time that has nothing to do but wait
NO_TOKEN = "the model gave no finite score to any token that is allowed"


@dataclass(eq=False)
class Choice:
    """One choice of a request: its sequence, and what the book knows besides."""

    sequence: Sequence
    seed: int
    constraint: Constraint
    scheduler: Scheduler  # where its sequence waits or runs
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # not told yet
    pooled: npt.NDArray[Any] | None = None  # of the prompt so far, if it is wanted
    adapter: int = 0  # the slot where it is; 0: none
    next_mask: Future[Ints | None] | None = None  # while it is being made
    is_late: bool = False  # a step has waited for that mask


@dataclass(eq=False)
class ActiveRequest:
    """A request that has not ended."""

    request: Request
    scheduler: Scheduler  # where its sequences wait at first
    choices: list[Choice] = field(default_factory=list)  # empty while it is being prepared
    reasons: dict[int, FinishReason] = field(default_factory=dict)  # of the choices that have ended
    matcher: Future[Matcher] | None = None  # while it is being made
    adapter: Future[HostAdapter] | None = None  # if it has one
    slot: Slot | None = None  # where that is, or will be soon
    added: float = field(default_factory=time.monotonic)
    has_begun: bool = False  # a step has taken it in


class End(NamedTuple):
    """Why a choice ends, and what is told of it (Update's fields)."""

    reason: FinishReason
    error: str = ""
    param: str | None = None
    kind: str = ""

    @classmethod
    def by(cls, error: Exception) -> End:
        param = error.param if isinstance(error, InvalidRequest) else None
        kind = type(error).__name__
        says_more = isinstance(error, QueueFull | UnknownModel | EngineStopped)
        return cls(FinishReason.ERROR, str(error) or kind, param, kind if says_more else "")


class RequestBook:
    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        grammars: GrammarFactory | None = None,
        seed: int = 0,
        adapters: AdapterPool | None = None,
    ) -> None:
        """`seed`: where the seeds of requests come from that bring none."""
        self.limits, self._adapters = limits, adapters
        self.ledger: Counter[str] = Counter()  # accepted, and one of finished, aborted, error for each
        self._spec, self._grammars, self._seed = spec, grammars, seed
        self._masks = MaskPool()
        self._active: dict[str, ActiveRequest] = {}
        self._preparing: dict[str, ActiveRequest] = {}  # their grammars and adapters
        self._choices: dict[Sequence, Choice] = {}  # that have begun and not ended
        self._held: dict[Choice, None] = {}  # those whose masks are being made, in order
        self._updates: list[Update] = []

    # ---- what is asked of it

    def add(self, request: Request, scheduler: Scheduler) -> None:
        """Accepts a request; raises InvalidRequest or QueueFull, and nothing was accepted then."""
        check_request(request, self.limits)
        if request.request_id in self._active:
            raise InvalidRequest.at("request_id", "it is in use")
        scheduler.check_room(request.params.num_choices + self.num_preparing)
        active = ActiveRequest(request, scheduler)
        if request.params.structured_outputs is not None:
            assert self._grammars is not None  # or it would have been refused
            active.matcher = self._grammars.submit(request.params.structured_outputs)
        if request.adapter is not None:
            assert self._adapters is not None
            active.adapter = self._adapters.load(request.adapter)
        if active.matcher or active.adapter:
            self._preparing[request.request_id] = active
        else:
            self._begin(active, None)
        self._active[request.request_id] = active
        self.ledger["accepted"] += 1

    def abort(self, request_id: str) -> None:
        """Ends a request at once; one that has ended, or never was, is ignored."""
        if active := self._active.get(request_id):
            self._end_all(active, End(FinishReason.ABORT))

    def stop(self, request_id: str, index: int) -> None:
        """Ends one choice as if it had come to a stop token: the reader of its text found a stop string."""
        active = self._active.get(request_id)
        if active and index < len(active.choices) and index not in active.reasons:
            self._end(active, index, End(FinishReason.STOP))

    @property
    def has_work(self) -> bool:
        return bool(self._active or self._updates)

    @property
    def has_updates(self) -> bool:
        return bool(self._updates)

    @property
    def num_preparing(self) -> int:
        """Choices that wait for their grammar or their adapter."""
        return sum(active.request.params.num_choices for active in self._preparing.values())

    @property
    def num_held(self) -> int:
        """Choices that sit steps out because their masks are being made."""
        return len(self._held)

    def adapters(self) -> tuple[list[str], list[str]]:
        """The names of those that running and waiting requests have."""
        sets: tuple[set[str], set[str]] = set(), set()
        for active in self._active.values() if self._adapters is not None else ():
            if active.request.adapter is not None:
                sets[not active.choices].add(active.request.adapter.name)
        return sorted(sets[0]), sorted(sets[1])

    def take_updates(self) -> list[Update]:
        """All that there is to tell."""
        updates, self._updates = self._updates, []
        return updates

    # ---- what steppers need

    def choice_of(self, sequence: Sequence) -> Choice | None:
        """None: it has ended."""
        return self._choices.get(sequence)

    def note_begin(self, sequence: Sequence) -> float | None:
        """A step takes the sequence in: how long its request has waited, if it is the first of it to run."""
        active = self._active[sequence.request_id]
        if active.has_begun:
            return None
        active.has_begun = True
        return time.monotonic() - active.added

    def tell(self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """A step brought these tokens; none: nothing could be chosen."""
        choice, active = self._choices[sequence], self._active[sequence.request_id]
        if sequence.finish_reason is FinishReason.ERROR:
            end = End(FinishReason.ERROR, NO_TOKEN, narrowing_field(active.request))
            self._end(active, sequence.index, end)
            return
        update = Update(sequence.request_id, sequence.index, token_ids, logprobs)
        update.prompt_logprobs, choice.prompt_logprobs = choice.prompt_logprobs, []
        if choice.pooled is not None:
            update.pooled = choice.pooled.astype(np.float32).tobytes()
        update.num_cached = sequence.num_cached or 0
        update.num_published = sequence.num_published * self.limits.block_size
        self._updates.append(update)
        if sequence.finish_reason is not None:
            if sequence.finish_reason is FinishReason.STOP and token_ids[-1] not in self._spec.eos_ids:
                update.stop_token_id = token_ids[-1]
            self._note_end(active, choice, sequence.finish_reason, update)
        elif choice.constraint.matcher is not None:
            self._follow(choice, token_ids)

    @contextmanager
    def failing(self, sequence: Sequence) -> Iterator[None]:
        """An exception that a request's own data causes ends that request only."""
        try:
            yield
        except Exception as error:
            self.fail(sequence, error)

    def fail(self, sequence: Sequence, error: Exception) -> None:
        active = self._active.get(sequence.request_id)
        if active is not None and sequence.index not in active.reasons:
            self._end(active, sequence.index, End.by(error))

    def place_adapters(self, runner: StepRunner) -> None:
        """Its devices have lost what they held."""
        if self._adapters is not None:
            self._adapters.place_again(runner)

    # ---- what is made beside the engine's thread

    def begin_prepared(self) -> None:
        """Lets those run whose grammars and adapters are ready; ends those whose grammars take too long."""
        takes_slots = True
        if self._preparing and self._adapters is not None:
            self._adapters.go_on()
        for active in list(self._preparing.values()):
            waited_s, matcher = time.monotonic() - active.added, active.matcher
            try:
                is_placed = active.adapter is None or self._is_placed(active, active.adapter, takes_slots)
                if is_placed and (matcher is None or matcher.done()):
                    del self._preparing[active.request.request_id]
                    active.matcher = None
                    self._begin(active, None if matcher is None else matcher.result())
            except Exception as error:  # whatever its data do to us, they end that request only
                self._end_all(active, End.by(error))
                continue
            if active.adapter and active.adapter.done() and not active.slot and waited_s > PATIENCE_S:
                takes_slots = False
            if matcher and not matcher.done() and waited_s > GRAMMAR_S:
                message = f"structured_outputs: others that are compiled before it take over {GRAMMAR_S:g} s"
                self._end_all(active, End(FinishReason.ERROR, message, kind=QueueFull.__name__))

    def _is_placed(self, active: ActiveRequest, loaded: Future[HostAdapter], takes_slots: bool) -> bool:
        """Whether its adapter is on the devices; it gets there if there is a slot."""
        assert self._adapters is not None
        if active.slot is None and takes_slots and loaded.done():
            active.slot = self._adapters.take(loaded.result())
        return active.slot is not None and self._adapters.is_placed(active.slot)

    def take_masks(self) -> None:
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

    def wait(self) -> None:
        """For what is made beside this thread, when that is all there is to do: does not spin."""
        beside: list[Future[Any] | None] = [choice.next_mask for choice in self._held]
        for active in self._preparing.values():
            beside += [active.matcher, active.adapter, active.slot.staged if active.slot else None]
        open_ones = [one for one in beside if one is not None and not one.done()]
        if open_ones:
            wait(open_ones, POLL_S, "FIRST_COMPLETED")

    def _follow(self, choice: Choice, token_ids: list[int]) -> None:
        """The choice sits out until the mask is there of what may follow the tokens."""
        assert choice.constraint.matcher is not None
        with self.failing(choice.sequence):
            choice.next_mask = self._masks.submit(choice.constraint.matcher, token_ids)
            choice.is_late, choice.sequence.is_held = False, True
            self._held[choice] = None

    def _take_mask(self, choice: Choice, made: Future[Ints | None]) -> None:
        choice.next_mask, choice.sequence.is_held = None, False
        with self.failing(choice.sequence):
            mask = made.result()
            if mask is None:
                active = self._active[choice.sequence.request_id]
                self._end(active, choice.sequence.index, End(FinishReason.STOP))
            else:
                choice.constraint.put_mask(mask)

    # ---- how requests begin and end

    def _begin(self, active: ActiveRequest, matcher: Matcher | None) -> None:
        request, params, spec = active.request, active.request.params, self._spec
        ends = not params.ignore_eos or params.structured_outputs is not None
        stop_ids = frozenset(params.stop_token_ids) | frozenset(spec.eos_ids if ends else ())
        seed, rules = self._seed_of(request), TokenRules(request, stop_ids, spec.vocab_size)
        kv_root = root_key(request.cache_salt, active.scheduler.pool.kv_dtype)
        # Who wants the prompt's log-probabilities needs all of it computed.
        needs_all = params.prompt_logprobs is not None or params.pooling in ("mean", "cls")
        extra_keys, adapter = request.extra_keys, 0
        if active.slot is not None and active.slot.adapter is not None:
            adapter = active.slot.number
            extra_keys = {**extra_keys, 0: f"adapter {active.slot.adapter.digest} {extra_keys.get(0, '')}"}
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
                recompute_len=spec.recompute_len,
                cache_key=None if needs_all else kv_root,
                extra_keys=extra_keys,
                cache_len=spec.uniform_len,
                waits_for_tokens=constraint.follows_tokens,
            )
            own_seed = (seed + index) % 2**64
            choices.append(Choice(sequence, own_seed, constraint, active.scheduler, adapter=adapter))
        active.choices = choices  # all of them, or none
        for choice in choices:
            self._choices[choice.sequence] = choice
            active.scheduler.add(choice.sequence)

    def _seed_of(self, request: Request) -> int:
        """Its own, or one that differs from request to request and follows from --seed."""
        if request.params.seed is not None:
            return request.params.seed % 2**64
        drawn = sha256(f"{self._seed} {self.ledger['accepted']}".encode()).digest()
        return int.from_bytes(drawn[:8])

    def _end_all(self, active: ActiveRequest, end: End) -> None:
        if active.matcher is not None:
            active.matcher.cancel()
        for index in range(active.request.params.num_choices):
            if index not in active.reasons:
                self._end(active, index, end)

    def _end(self, active: ActiveRequest, index: int, end: End) -> None:
        """Ends a choice, told by an update of its own."""
        update = Update(active.request.request_id, index, error=end.error, param=end.param, kind=end.kind)
        self._updates.append(update)
        choice = active.choices[index] if active.choices else None
        if choice is not None and choice.sequence.finish_reason is None:
            choice.scheduler.finish(choice.sequence, end.reason)
        self._note_end(active, choice, end.reason, update)

    def _note_end(
        self, active: ActiveRequest, choice: Choice | None, reason: FinishReason, update: Update
    ) -> None:
        update.finish_reason = reason
        active.reasons[update.index] = reason
        if choice is not None:
            update.num_preempted = choice.sequence.num_preempted
            del self._choices[choice.sequence]
        if len(active.reasons) == active.request.params.num_choices:
            del self._active[active.request.request_id]
            self._preparing.pop(active.request.request_id, None)
            if self._adapters is not None and active.slot is not None:
                self._adapters.release(active.slot)
            reasons = set(active.reasons.values())
            bad = {FinishReason.ERROR: "error", FinishReason.ABORT: "aborted"}
            self.ledger[next((name for r, name in bad.items() if r in reasons), "finished")] += 1

    # ---- invariants

    def check(self, num_sequences: int) -> None:
        """Those that hold between any two calls, where schedulers know of so many sequences."""
        ended = self.ledger["finished"] + self.ledger["aborted"] + self.ledger["error"]
        assert self.ledger["accepted"] == ended + len(self._active), f"a request is lost: {self.ledger}"
        open_choices = {
            choice.sequence
            for active in self._active.values()
            for index, choice in enumerate(active.choices)
            if index not in active.reasons
        }
        assert open_choices == set(self._choices)
        assert len(open_choices) == num_sequences
        assert set(self._preparing) == {name for name, active in self._active.items() if not active.choices}
        if self._adapters is not None:
            self._adapters.check(sum(active.slot is not None for active in self._active.values()))

    def check_idle(self) -> None:
        """A part of these that takes no time to speak of, for a book without requests."""
        assert len(self._active) + len(self._choices) + len(self._preparing) == 0, "a request is lost"
        if self._adapters is not None:
            self._adapters.check(0)
