"""Who runs in the next step: first come, first served, but for priority and the length of prompts. Pure
Python: no arrays, no devices.

A step decodes one token for every running sequence that can, and takes in as many tokens of prompts besides
as keep it within the time that is aimed at; without chunked prefill it does one or the other. A sequence is
admitted when its tokens so far fit into free blocks, and gets more blocks as it grows. When they run out, the
last in order gives all of its own up and is computed anew later.

Steps are read after the next one was sent off. What a sequence holds is therefore released only when the last
step that it takes part in has been read, and nobody is preempted while any step is in flight. Blocks can be
found by others only when the step that filled them was read; who could use blocks that a step in flight is
filling waits for that step instead of computing them again.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike

from hex_llm.errors import QueueFull
from hex_llm.scheduling.blocks import BlockPool
from hex_llm.scheduling.limits import StepLimits, StepTimes
from hex_llm.scheduling.sequence import NO_SLOT, PREFILLING, Sequence, State
from hex_llm.types import Chunk, FinishReason, StepPlan

Rows = list[tuple[Sequence, Chunk]]

# A sequence that was preempted so often gets the blocks of its longest life at once, and keeps them.
MAX_PREEMPTIONS = 3
MAX_PASSED = 64  # of those that wait and cannot begin yet, so many are passed over in a step
PRIORITY_S = 10.0  # how much earlier a request counts as having come, for each doubling of its priority
# A prompt counts as having come later by the time that it takes, so that short ones pass it, but by no more.
MAX_PASSED_S = 5.0
FIRST_TOKEN_WEIGHT = 32  # of a first token's delay, beside that of others
LATER_WEIGHT = 2  # of what one step more costs those behind, beside first tokens that come sooner
MIN_PROMPT_TOKENS = 32  # that a step takes in, even if its decodes take all of the time


def precedence(priority: int) -> float:
    """Seconds that a request of this priority counts as having come later (if negative, earlier) than it did.

    Bounded, at 310 s: whoever waits is overtaken only by who comes that much later.
    """
    return math.copysign(PRIORITY_S * math.log2(1 + abs(priority)), priority)


class Scheduler:
    def __init__(
        self, pool: BlockPool, limits: StepLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.times: StepTimes | None = None  # None: unknown, so that all steps may be as large as can be
        self.running: list[Sequence] = []
        self.num_waiting = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens that were looked for among cached prefixes, and those found
        self.num_prefix_hits = 0
        self._clock = clock
        self._waiting: list[tuple[float, int, Sequence]] = []  # a heap; may hold some that have ended
        self._filling: dict[bytes, Sequence] = {}  # keys of blocks that steps in flight fill, and for whom
        self._leaving: list[Sequence] = []  # ended, but a step in flight still touches what they hold
        self._free_slots = list(range(limits.max_decode_seqs, NO_SLOT, -1))
        self._num_arrived = 0
        self._in_flight = 0
        self.hands_over = False  # who has been prefilled goes on elsewhere

    # ---- who comes and goes

    def check_room(self, num_sequences: int) -> None:
        """Refuses what would make the queue too long."""
        most, now = self.limits.max_sequences, self.num_waiting + len(self.running)
        if now + num_sequences > most:
            raise QueueFull(f"{now} sequences are running or waiting, and no more than {most} may be")

    def add(self, sequence: Sequence) -> None:
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        sequence.rank = self._clock() + precedence(sequence.priority)
        if self.times is not None:
            sequence.rank += min(self.times.prefill_seconds(sequence.length), MAX_PASSED_S)
        self._enqueue(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends it, wherever it stands; what it holds is released when no step touches it any more."""
        assert sequence.finish_reason is None, "it has ended before"
        sequence.finish_reason = reason
        if sequence.state is State.WAITING:
            sequence.move_to(State.ENDED)
            self.num_waiting -= 1
            return
        sequence.move_to(State.ENDING)
        self.running.remove(sequence)
        self._leaving.append(sequence)
        self._release_leaving()

    def preempt(self, sequence: Sequence) -> None:
        """It gives up all that it holds, to be computed anew in its turn."""
        sequence.num_preempted += 1
        self.num_preemptions += 1
        self._put_back(sequence)

    # ---- who moves from one scheduler to another

    def movable(self) -> list[Sequence]:
        """Who has been prefilled, and whose tokens are all known."""
        return [s for s in self.running if s.state is State.IN_TRANSFER and s.num_in_flight == 0]

    def hand_over(self, sequence: Sequence, to: Scheduler) -> tuple[list[int], list[int]] | None:
        """The blocks that hold its tokens here, and those that must hold them there before it goes on; what
        the first hold must be taken before another step is sent off. None: there is no room."""
        needed = to.pool.blocks_for(sequence.length)
        if not to._free_slots or needed + to._num_growing() > to.pool.num_free:
            return None
        source = sequence.blocks[: self.pool.blocks_for(sequence.num_computed)]
        self.running.remove(sequence)
        self._release(sequence)
        sequence.slot, sequence.slot_is_written = to._free_slots.pop(), False
        sequence.blocks, sequence.num_published = to.pool.take(needed), 0
        insort(to.running, sequence, key=lambda s: s.order)
        return source, sequence.blocks[: len(source)]

    def take_waiting(self) -> list[Sequence]:
        """All that wait, to wait elsewhere."""
        waiting = [s for _, _, s in self._waiting if s.finish_reason is None]
        self._waiting, self.num_waiting = [], 0
        return waiting

    def wait_again(self, sequence: Sequence) -> None:
        """It has waited, and run, elsewhere."""
        self._enqueue(sequence)

    # ---- steps

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """The next step, to be sent off, and the sequences of its rows in order.

        Empty: nothing can run before the steps in flight are read, or nothing is left to do.
        """
        self._restart_outgrown()
        limits, decodes = self.limits, Rows()
        prefills = Rows() if limits.chunked else self._prefills(limits.max_tokens)
        if not prefills and self._grow():
            decodes = [(s, s.take_in(1)) for s in self.running if s.can_decode]
            if limits.chunked:
                num_keys = sum(chunk.end for _, chunk in decodes)
                prefills = self._prefills(self._prompt_budget(len(decodes), num_keys), len(decodes), num_keys)
        self._in_flight += bool(decodes or prefills)
        plan = StepPlan(tuple(chunk for _, chunk in decodes), tuple(chunk for _, chunk in prefills))
        sequences = [sequence for sequence, _ in decodes + prefills]
        if self.hands_over:
            for sequence in sequences:
                if sequence.state is State.DECODING:
                    sequence.move_to(State.IN_TRANSFER)
        return plan, sequences

    def drop_ended(self, plan: StepPlan, sequences: ListLike[Sequence]) -> tuple[StepPlan, list[Sequence]]:
        """The step that was scheduled last and was not sent off yet, without those that have ended since."""
        if all(s.finish_reason is None for s in sequences):
            return plan, list(sequences)
        rows = list(zip(plan.chunks, sequences, strict=True))
        for sequence in sequences:
            sequence.num_in_flight -= sequence.finish_reason is not None
        decodes, prefills = (
            tuple(chunk for chunk, s in part if s.finish_reason is None)
            for part in (rows[: len(plan.decodes)], rows[len(plan.decodes) :])
        )
        left = [s for s in sequences if s.finish_reason is None]
        self._in_flight -= not left
        self._release_leaving()
        return StepPlan(decodes, prefills), left

    def collect(
        self, plan: StepPlan, sequences: ListLike[Sequence], token_ids: ListLike[list[int]]
    ) -> list[tuple[int, list[int]]]:
        """The oldest step in flight was read: what each of its rows chose; empty: nothing could be chosen.

        Returns the rows that brought tokens or an end, with these: not those whose sequence had ended before.
        """
        self._in_flight -= 1
        touched, publishes = [], self.limits.prefix_unit is not None
        rows = zip(plan.chunks, sequences, token_ids, strict=True)
        for row, (chunk, sequence, chosen) in enumerate(rows):
            sequence.num_in_flight -= 1
            sequence.num_written = chunk.end
            reason = None
            if chunk.samples and sequence.finish_reason is None:
                taken, reason = sequence.read(chosen) if chosen else ([], FinishReason.ERROR)
                touched.append((row, taken))
            if publishes and (chosen or not chunk.samples):
                self._publish(sequence)
            if reason is not None:
                self.finish(sequence, reason)
        self._release_leaving()
        return touched

    def abandon(self, sequences: ListLike[Sequence]) -> None:
        """A step in flight will never be read; all of its sequences have ended."""
        self._in_flight -= 1
        for sequence in sequences:
            sequence.num_in_flight -= 1
        self._release_leaving()

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.num_waiting or self._leaving or self._in_flight)

    def check(self) -> None:
        """The invariants that hold between any two calls."""
        holders = self.running + self._leaving
        self.pool.check(s.blocks for s in holders)
        slots = [s.slot for s in holders] + self._free_slots
        assert sorted(slots) == list(range(1, self.limits.max_decode_seqs + 1)), (
            "a slot is lost or held twice"
        )
        waiting = [s for _, _, s in self._waiting if s.finish_reason is None]
        assert len(waiting) == self.num_waiting
        assert all(s.state is State.WAITING and not s.num_in_flight for s in waiting)
        assert all(s.slot == NO_SLOT and not s.blocks for s in waiting)
        assert all(s.state not in (State.WAITING, State.ENDING, State.ENDED) for s in self.running)
        assert all((s.finish_reason is not None) == (s.state is State.ENDING) for s in holders)
        assert all(s.state is State.ENDING and s.num_in_flight for s in self._leaving)
        assert self.running == sorted(self.running, key=lambda s: s.order)
        for s in self.running:
            assert s.num_computed <= min(s.length, len(s.blocks) * self.pool.block_size)
        assert all(s in holders and s.num_in_flight for s in self._filling.values())
        if self.is_idle:
            assert self.pool.num_free == self.pool.num_usable

    def check_idle(self) -> None:
        """The same of a scheduler with nothing to do, as far as it takes no time to speak of: of the pool's
        blocks each call looks at the next ones."""
        assert self.is_idle, "something is left"
        assert not self._filling
        assert sorted(self._free_slots) == list(range(1, self.limits.max_decode_seqs + 1))
        assert self.pool.num_free == self.pool.num_usable
        self.pool.check_some_free()

    # ---- parts of a step

    def _grow(self) -> bool:
        """Gives every sequence that can decode the block that it is about to write.

        False: blocks ran out while steps are in flight. They must be read before anyone is preempted.
        """
        for sequence in list(self.running):
            while sequence.can_decode and self._lacks_block(sequence):
                if self.pool.num_free:
                    sequence.blocks += self.pool.take(1)
                elif self._in_flight:
                    return False
                else:
                    self.preempt(self._last_from(sequence))
        return True

    def _lacks_block(self, sequence: Sequence) -> bool:
        reached = len(sequence.blocks) * self.pool.block_size
        return sequence.slot != NO_SLOT and sequence.num_computed >= reached

    def _last_from(self, sequence: Sequence) -> Sequence:
        """Who is preempted for `sequence`: the last in order, at worst itself, never one that came before."""
        later = self.running[self.running.index(sequence) :]
        return next(s for s in reversed(later) if s.num_preempted < MAX_PREEMPTIONS)

    def _prompt_budget(self, num_decodes: int, num_keys: int) -> int:
        """Prompt tokens that a step may take beside decodes that see so many keys."""
        most = self.limits.max_tokens - num_decodes
        if self.times is None or not num_decodes:
            return most
        within = self.times.tokens_within(self.limits.target_s, num_keys)
        sizes = self.limits.step_sizes  # a step that fills one is not padded
        whole = sizes[max(bisect_right(sizes, within) - 1, 0)] if sizes else within
        return min(max(whole - num_decodes, MIN_PROMPT_TOKENS), most)

    def _prefills(self, budget: float, num_decodes: int = 0, num_keys: int = 0) -> Rows:
        """Chunks of at most `budget` tokens together, of those that have begun and those that wait, in order.
        Beside decodes (`num_keys`: that they see) a token counts as many that cost as much at the beginning
        of a prompt."""
        alone_s = math.inf if self.times is None else self.times.decodes_seconds(num_decodes, num_keys)
        taken: list[tuple[Sequence, int]] = []
        begun = deque(s for s in self.running if s.state is PREFILLING and s.num_left > 1 and not s.is_held)
        passed: list[tuple[float, int, Sequence]] = []
        admits = True
        while budget >= 1 and len(taken) < self.limits.max_prefill_seqs:
            first, shared = self._next_waiting() if admits and len(passed) < MAX_PASSED else None, list[int]()
            has_begun = bool(begun) and (first is None or begun[0].order < first.order)
            if has_begun:
                first = begun[0]
            elif first is None:
                break
            else:
                shared, more_is_coming = self._cached_blocks(first)
                if first.is_held or more_is_coming:
                    passed.append(heapq.heappop(self._waiting))
                    continue
            total = num_decodes + sum(num_tokens for _, num_tokens in taken)
            more = min(first.num_left - len(shared) * self.pool.block_size, int(budget))
            later_s = alone_s * (len(begun) + self.num_waiting)
            if self._had_better_end(taken, total, more, later_s):
                budget = min(budget, self._room(total))
                if budget < 1:
                    break
            if has_begun:
                begun.popleft()
            elif not self._admit(first, shared):
                admits = False
                continue
            budget -= self._take(first, budget, taken, weighed=num_decodes > 0)
        for one in passed:
            heapq.heappush(self._waiting, one)
        self._fit(taken, num_decodes)
        return [(sequence, sequence.take_in(num_tokens)) for sequence, num_tokens in taken]

    def _had_better_end(
        self, taken: list[tuple[Sequence, int]], total: int, more: int, later_s: float
    ) -> bool:
        """Whether a step of `total` tokens had better end before so many more: prompts that end in it have
        their first tokens sooner by what these take, and those behind theirs later, by so much in sum."""
        num_ending = sum(num_tokens == sequence.num_left for sequence, num_tokens in taken)
        if self.times is None or not (self.limits.chunked and num_ending):
            return False
        sooner_s = self.times.seconds(total + more) - self.times.seconds(total)
        return num_ending * sooner_s > LATER_WEIGHT * later_s

    def _room(self, total: int) -> int:
        """Tokens that a step of so many takes in instead of padding."""
        sizes = self.limits.step_sizes
        return min(sizes[bisect_left(sizes, total)], self.limits.max_tokens) - total if sizes else 0

    def _take(
        self, sequence: Sequence, budget: float, taken: list[tuple[Sequence, int]], weighed: bool
    ) -> float:
        """What it takes of the budget. Without chunked prefill the first of a step is taken whole; the last
        may still be cut, to use what is left of the budget."""
        num_tokens, weight = sequence.num_left, 1.0
        if self.limits.chunked or taken:
            num_tokens = min(num_tokens, int(budget))
            if weighed and self.times is not None:
                weight = self.times.weight(sequence.num_computed + num_tokens // 2)
                num_tokens = min(num_tokens, max(int(budget / weight), 1))
        taken.append((sequence, num_tokens))
        self._note_filling(sequence, num_tokens)
        return num_tokens * weight

    def _fit(self, taken: list[tuple[Sequence, int]], num_decodes: int) -> None:
        """Takes more of the last prompt instead of padding; or, if all of it was taken, leaves so much to the
        next step that this one is not padded, if that is better on the whole."""
        sizes, total = self.limits.step_sizes, num_decodes + sum(num_tokens for _, num_tokens in taken)
        i = bisect_left(sizes, total)
        if self.times is None or not (self.limits.chunked and taken and 0 < i < len(sizes)):
            return
        sequence, num_tokens = taken[-1]
        more, rest = self._room(total), total - sizes[i - 1]
        if num_tokens < sequence.num_left:
            taken[-1] = (sequence, min(num_tokens + more, sequence.num_left))
            self._note_filling(*taken[-1])
        elif rest < num_tokens and self._is_better_cut(self.times, i, rest, num_decodes + len(taken) - 1):
            taken[-1] = (sequence, num_tokens - rest)
            self._fills_no_more(sequence, self._keys_within(sequence, sequence.num_computed + num_tokens))
            self._note_filling(*taken[-1])

    def _is_better_cut(self, times: StepTimes, i: int, rest: int, others: int) -> bool:
        """Whether a step of the i-th size is better cut to the size before, and the rest of its last prompt
        added to the next: that prompt's first token comes later, and the tokens of the others sooner."""
        sizes = self.limits.step_sizes

        def padded_s(num_tokens: int) -> float:
            return times.seconds(sizes[min(bisect_left(sizes, num_tokens), len(sizes) - 1)])

        whole_s, both_s = times.seconds(sizes[i]), times.seconds(sizes[i - 1]) + padded_s(others + rest)
        gained_s = whole_s + (padded_s(others) if others else 0) - both_s
        return FIRST_TOKEN_WEIGHT * (both_s - whole_s) < others * gained_s

    def _next_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][-1].finish_reason is not None:
            heapq.heappop(self._waiting)
        return self._waiting[0][-1] if self._waiting else None

    def _admit(self, sequence: Sequence, shared: list[int]) -> bool:
        """Gives the first of those that wait a slot and blocks for its tokens, if there are; `shared` blocks
        hold the beginning of these already."""
        num_cached = len(shared) * self.pool.block_size
        kept = sequence.num_preempted >= MAX_PREEMPTIONS
        needed = self.pool.blocks_for(sequence.max_len if kept else sequence.length) - len(shared)
        self.pool.share(shared)
        if not self._free_slots or needed + self._num_growing() > self.pool.num_free:
            self.pool.release(shared)
            return False
        heapq.heappop(self._waiting)
        self.num_waiting -= 1
        sequence.move_to(State.PREFILLING)
        sequence.slot, sequence.slot_is_written = self._free_slots.pop(), False
        sequence.blocks = shared + self.pool.take(needed)
        sequence.num_computed = num_cached
        sequence.num_published, sequence.num_written = len(shared), num_cached
        if sequence.num_cached is None:
            sequence.num_cached = num_cached
            if self.limits.prefix_unit is not None:
                self.num_prefix_queries += sequence.length
                self.num_prefix_hits += num_cached
        insort(self.running, sequence, key=lambda s: s.order)
        return True

    def _num_growing(self) -> int:
        """Running sequences that may soon want one more block: were it not left to them, they would preempt
        whoever is admitted now."""
        return sum(len(s.blocks) < self.pool.blocks_for(s.max_len) for s in self.running)

    # ---- what sequences hold

    def _cached_blocks(self, sequence: Sequence) -> tuple[list[int], bool]:
        """Blocks that hold the beginning of its tokens already, and whether steps in flight are filling more
        of them; its last token is computed in any case."""
        unit, size = self.limits.prefix_unit, self.pool.block_size
        if unit is None or not sequence.shares_blocks:
            return [], False
        keys = sequence.keys((sequence.length - 1) // unit * unit // size, size)
        found = self.pool.find(keys)
        num_soon = len(found)
        while num_soon < len(keys) and keys[num_soon] in self._filling:
            num_soon += 1
        usable, soon = (num_blocks * size // unit * unit // size for num_blocks in (len(found), num_soon))
        return found[:usable], soon > usable

    def _keys_within(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Of its blocks that are full with so many tokens, all known, and that were not published yet."""
        if self.limits.prefix_unit is None or not sequence.shares_blocks:
            return []
        num_full = min(num_tokens, len(sequence.token_ids)) // self.pool.block_size
        if num_full <= sequence.num_published:  # as after most steps: nothing is copied for it
            return []
        return sequence.keys(num_full, self.pool.block_size)[sequence.num_published :]

    def _note_filling(self, sequence: Sequence, num_tokens: int) -> None:
        """The next step takes so many of its tokens in."""
        for key in self._keys_within(sequence, sequence.num_computed + num_tokens):
            self._filling.setdefault(key, sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Lets others find its blocks that are full and were filled by steps that have been read."""
        keys = self._keys_within(sequence, sequence.num_written)
        for i, key in enumerate(keys, sequence.num_published):
            self.pool.publish(sequence.blocks[i], key)
        sequence.num_published += len(keys)
        unpublished = sequence.block_keys[sequence.num_published :]  # none after most steps
        if unpublished and not sequence.shares_blocks:  # it has grown too long: nobody shall wait for them
            keys = unpublished
        self._fills_no_more(sequence, keys)

    def _fills_no_more(self, sequence: Sequence, keys: ListLike[bytes]) -> None:
        for key in keys:
            if self._filling.get(key) is sequence:
                del self._filling[key]

    def _restart_outgrown(self) -> None:
        for sequence in [s for s in self.running if s.must_restart and not s.num_in_flight]:
            self._put_back(sequence)

    def _put_back(self, sequence: Sequence) -> None:
        assert sequence.num_in_flight == 0, "a step in flight touches its blocks"
        sequence.move_to(State.WAITING)
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        if sequence.must_restart:
            sequence.rope_length = sequence.length
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (*sequence.order, sequence))
        self.num_waiting += 1

    def _release_leaving(self) -> None:
        for sequence in [s for s in self._leaving if s.num_in_flight == 0]:
            sequence.move_to(State.ENDED)
            self._leaving.remove(sequence)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._fills_no_more(sequence, sequence.block_keys[sequence.num_published :])
        self.pool.release(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.blocks, sequence.slot = [], NO_SLOT
