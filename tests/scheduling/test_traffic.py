"""The scheduler on random traffic: its invariants hold after every call, and nobody is forgotten."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hex_llm.errors import QueueFull
from hex_llm.scheduling.blocks import BlockPool
from hex_llm.scheduling.limits import StepLimits, StepTimes
from hex_llm.scheduling.scheduler import Scheduler
from hex_llm.scheduling.sequence import Sequence
from hex_llm.types import FinishReason, StepPlan
from tests.scheduling.test_scheduler import STOP, sequence


class Traffic(RuleBasedStateMachine):
    """Requests come, steps are sent off and read, some choose an end or nothing, some are aborted."""

    @initialize(
        block_size=st.sampled_from([1, 4, 8]),
        num_blocks=st.integers(6, 14),
        prefills=st.integers(1, 3),
        decodes=st.integers(1, 5),
        tokens=st.integers(5, 40),
        chunked=st.booleans(),
        unit=st.sampled_from([None, 1, 2]),
        depth=st.integers(0, 2),
        recompute_len=st.sampled_from([None, 12]),
        cache_len=st.sampled_from([None, 12]),
        timed=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        prefills: int,
        decodes: int,
        tokens: int,
        chunked: bool,
        unit: int | None,
        depth: int,
        recompute_len: int | None,
        cache_len: int | None,
        timed: bool,
    ) -> None:
        self.depth, self.recompute_len, self.cache_len = depth, recompute_len, recompute_len or cache_len
        prefix_unit = None if unit is None else unit * block_size
        sizes = {"step_sizes": (1, 4, 9, 16, 40)}
        self.limits = StepLimits(prefills, decodes, tokens, chunked, prefix_unit, 12, target_s=0.02, **sizes)
        clock = partial(next, count())  # a real one would not do the same again
        self.scheduler = Scheduler(BlockPool(num_blocks, block_size), self.limits, clock)
        if timed:
            self.scheduler.times = StepTimes({1: 0.01, 4: 0.01, 16: 0.04})
        self.most = (num_blocks - 1) * block_size
        self.in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self.alive: list[Sequence] = []
        self.num_added = 0
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}  # of places in blocks: all tokens up to it
        self.tokens_of: dict[bytes, tuple[int, ...]] = {}  # by the keys of blocks

    @rule(
        prompt=st.integers(1, 30),
        output=st.integers(1, 20),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        waits=st.booleans(),
        shares=st.booleans(),
    )
    def add(self, prompt: int, output: int, priority: int, waits: bool, shares: bool) -> None:
        prompt = min(prompt, self.most - 1)
        output = min(output, self.most - prompt)
        room = self.scheduler.num_waiting + len(self.scheduler.running) < 12
        try:
            self.scheduler.check_room(1)
        except QueueFull:
            assert not room
            return
        assert room
        self.num_added += 1
        added = sequence(
            str(self.num_added),
            prompt,
            output,
            priority=priority,
            waits_for_tokens=waits,
            recompute_len=self.recompute_len,
            cache_len=self.cache_len,
            **({} if shares else {"cache_key": None}),
        )
        self.scheduler.add(added)
        self.alive.append(added)

    @precondition(lambda self: len(self.in_flight) <= self.depth)
    @rule()
    def send_off(self) -> None:
        plan, rows = self.scheduler.schedule()
        if not rows:
            assert self.in_flight or not self.alive, "something waits, and nothing runs"
            return
        self.in_flight.append((plan, rows))
        self._check_plan(plan, rows)

    @precondition(lambda self: len(self.in_flight) <= self.depth)
    @rule(fails=st.lists(st.booleans(), min_size=8, max_size=8))
    def send_off_a_part(self, fails: list[bool]) -> None:
        """Some fail after they were scheduled."""
        plan, rows = self.scheduler.schedule()
        if not rows:
            return
        for s, fail in zip(rows, fails * len(rows), strict=False):
            if fail:
                self.scheduler.finish(s, FinishReason.ERROR)
                self.alive.remove(s)
        plan, rows = self.scheduler.drop_ended(plan, rows)
        assert all(s.finish_reason is None for s in rows)
        if rows:
            self.in_flight.append((plan, rows))
            self._check_plan(plan, rows)

    def _check_plan(self, plan: StepPlan, rows: list[Sequence]) -> None:
        assert len(plan.chunks) == len(rows) == len(set(rows))
        assert len(plan.prefills) <= self.limits.max_prefill_seqs
        assert len(plan.decodes) <= self.limits.max_decode_seqs
        assert self.limits.chunked or not (plan.decodes and plan.prefills)
        total = sum(chunk.num_tokens for chunk in plan.chunks)
        assert total <= self.limits.max_tokens or (not self.limits.chunked and len(plan.prefills) == 1)
        written: set[tuple[int, int]] = set()
        size = self.scheduler.pool.block_size
        for chunk, s in zip(plan.chunks, rows, strict=True):
            assert chunk.slot == s.slot
            assert chunk.end <= s.length
            places = {(s.blocks[p // size], p % size) for p in range(chunk.position, chunk.end)}
            assert not places & written, "two rows write to one place"
            written |= places
        for chunk in plan.decodes:
            assert chunk.num_tokens == 1

    @precondition(lambda self: self.in_flight)
    @rule(
        tokens=st.lists(st.sampled_from([1, 2, 3, STOP, -1]), min_size=8, max_size=8),
        more=st.lists(st.sampled_from([0, 0, 1, 3]), min_size=8, max_size=8),
    )
    def read(self, tokens: list[int], more: list[int]) -> None:
        plan, rows = self.in_flight.popleft()
        ended_before = {s for s in rows if s.finish_reason is not None}
        size = self.scheduler.pool.block_size
        chosen = [[] if token == -1 else [token] for token in (tokens * len(rows))[: len(rows)]]
        for chunk, s, choice, num_more in zip(plan.chunks, rows, chosen, more * len(rows), strict=False):
            if choice and s.num_unread == 1 and chunk.samples:  # as many as its blocks have room for
                choice += [1] * min(num_more, len(s.blocks) * size - chunk.end)
            all_ids = s.token_ids + choice[:-1]
            for place in range(chunk.position, chunk.end + max(0, len(choice) - 1)):
                self.content[s.blocks[place // size], place % size] = tuple(all_ids[: place + 1])
        touched = self.scheduler.collect(plan, rows, chosen)
        for s in rows:
            for i, key in enumerate(s.block_keys, 1):
                self.tokens_of[key] = tuple(s.token_ids[: i * size])
        for row, taken in touched:
            assert plan.chunks[row].samples
            assert rows[row] not in ended_before
            assert taken == chosen[row][: len(taken)]
            if not chosen[row]:
                assert rows[row].finish_reason is FinishReason.ERROR
            elif chosen[row][0] == STOP:
                assert (taken, rows[row].finish_reason) == ([STOP], FinishReason.STOP)
            elif len(taken) < len(chosen[row]):
                assert rows[row].finish_reason is FinishReason.LENGTH
        self.alive = [s for s in self.alive if s.finish_reason is None]

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        self.scheduler.finish(self.alive.pop(which % len(self.alive)), FinishReason.ABORT)

    @precondition(lambda self: not self.in_flight and self.scheduler.running)
    @rule(which=st.integers(0, 100))
    def preempt(self, which: int) -> None:
        running = self.scheduler.running
        self.scheduler.preempt(running[which % len(running)])

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        for key, block in self.scheduler.pool.published.items():  # what can be found was computed
            tokens = self.tokens_of[key]
            for offset, end in enumerate(range(len(tokens) - self.scheduler.pool.block_size, len(tokens)), 0):
                assert self.content.get((block, offset)) == tokens[: end + 1]
        for plan, rows in self.in_flight:  # nothing that a step touches is free
            for chunk, s in zip(plan.chunks, rows, strict=True):
                assert s.slot == chunk.slot, "its slot was given up under a step in flight"
                assert all(self.scheduler.pool.num_holders[block] for block in s.blocks)

    def teardown(self) -> None:
        """Whatever has come to be comes to an end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            plan, rows = self.scheduler.schedule()
            if rows:
                self.in_flight.append((plan, rows))
            elif not self.in_flight:
                break
            if self.in_flight:
                plan, rows = self.in_flight.popleft()
                self.scheduler.collect(plan, rows, [[1]] * len(rows))
        self.scheduler.check()
        assert self.scheduler.is_idle, "some never end"


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongTraffic(Traffic):
    """The same, 100,000 calls."""


TestLongTraffic = pytest.mark.slow(LongTraffic.TestCase)
TestLongTraffic.settings = settings(
    max_examples=1000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
