"""The scheduler alone, on random traffic: its invariants hold after every call, and nobody is forgotten."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hex_llm.errors import QueueFull
from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling.blocks import BlockPool, next_key, root_key
from hex_llm.scheduling.limits import StepLimits, StepTimes
from hex_llm.scheduling.scheduler import MAX_PREEMPTIONS, Scheduler
from hex_llm.scheduling.sequence import Sequence, State
from hex_llm.types import FinishReason, StepPlan

STOP = 9


def sequence(name: str, num_prompt: int, max_tokens: int, **more: object) -> Sequence:
    ids = [i % 7 for i in range(num_prompt)]
    values = {"cache_key": root_key(""), **more}
    return Sequence(name, ids, SamplingParams(), frozenset({STOP}), num_prompt + max_tokens, **values)  # type: ignore[arg-type]


def num_generated(sequence: Sequence) -> int:
    return len(sequence.token_ids) - len(sequence.prompt_ids)


def limits(**changes: object) -> StepLimits:
    return StepLimits(**{"max_prefill_seqs": 2, "max_decode_seqs": 4, "max_tokens": 1000, **changes})  # type: ignore[arg-type]


def run(scheduler: Scheduler, depth: int = 0) -> list[StepPlan]:
    """Runs until nothing is left, `depth` steps ahead of what is read; every row chooses token 1."""
    plans, in_flight = [], deque[tuple[StepPlan, list[Sequence]]]()
    for _ in range(10_000):
        plan, rows = scheduler.schedule()
        if rows:
            plans.append(plan)
            in_flight.append((plan, rows))
        elif not in_flight:
            break
        if in_flight and (len(in_flight) > depth or not rows):
            plan, rows = in_flight.popleft()
            scheduler.collect(plan, rows, [[1]] * len(rows))
        scheduler.check()
    assert scheduler.is_idle
    return plans


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


def prefix_users(num_users: int, **changes: object) -> tuple[Scheduler, list[Sequence]]:
    scheduler = Scheduler(BlockPool(100, 4), limits(prefix_unit=4, max_prefill_seqs=4, **changes))
    users = [sequence(str(i), 20, 2) for i in range(num_users)]
    for one in users:
        scheduler.add(one)
    return scheduler, users


def test_blocks_can_be_found_when_the_step_that_filled_them_was_read() -> None:
    scheduler, _ = prefix_users(1)
    plan, rows = scheduler.schedule()
    assert scheduler.pool.num_cached == 0
    scheduler.collect(plan, rows, [[1]])
    assert scheduler.pool.num_cached == 5
    run(scheduler)


def test_blocks_of_a_step_that_was_not_sent_cannot_be_found() -> None:
    scheduler, (first, second) = prefix_users(2)
    plan, rows = scheduler.schedule()
    scheduler.finish(first, FinishReason.ERROR)
    assert scheduler.drop_ended(plan, rows) == (StepPlan(), [])
    scheduler.check()
    assert scheduler.pool.num_cached == 0
    run(scheduler)
    assert second.num_cached == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_who_shares_a_prefix_waits_while_it_is_computed_and_nobody_behind_them_does(depth: int) -> None:
    scheduler, users = prefix_users(4)
    scheduler.add(sequence("other", 3, 2, cache_key=root_key("other")))
    plans = run(scheduler, depth)
    assert [chunk.num_tokens for chunk in plans[0].prefills] == [20, 3]
    assert [user.num_cached for user in users] == [0, 16, 16, 16]


def test_who_waits_ages() -> None:
    """A stream of requests with the best priority comes before the others for minutes, not for ever."""
    now = 0.0
    scheduler = Scheduler(BlockPool(100, 8), limits(max_prefill_seqs=1), clock=lambda: now)
    scheduler.add(patient := sequence("patient", 4, 1))
    for second in range(400):
        now = float(second)
        scheduler.add(sequence(f"at {second}", 4, 1, priority=-(2**31 - 1)))
        plan, rows = scheduler.schedule()
        scheduler.collect(plan, rows, [[1]] * len(rows))
        if patient.finish_reason is not None:
            break
    assert 300 < now < 320


def test_first_come_first_served_but_for_priority() -> None:
    scheduler = Scheduler(BlockPool(100, 8), limits(max_prefill_seqs=1))
    for i, priority in enumerate([0, 0, -1, 5, 0]):
        scheduler.add(sequence(str(i), 4, 1, priority=priority))
    order = []
    while True:
        plan, rows = scheduler.schedule()
        if not rows:
            break
        order += [s.request_id for s in rows]
        scheduler.collect(plan, rows, [[1]])
    assert order == ["2", "0", "1", "4", "3"]


@pytest.mark.parametrize("depth", [0, 1])
def test_growing_past_the_switch_is_computed_anew(depth: int) -> None:
    """Longrope: past its original length all keys need other frequencies."""
    scheduler = Scheduler(BlockPool(12, 8), limits())
    scheduler.add(sequence("a", 6, 10, recompute_len=8))
    kinds = [(c.num_tokens, max(c.rope_length, c.end)) for plan in run(scheduler, depth) for c in plan.chunks]
    assert kinds == [(6, 6), (1, 7), (1, 8), (9, 9), (1, 10), (1, 11), (1, 12), (1, 13), (1, 14), (1, 15)]


@pytest.mark.parametrize("depth", [0, 1])
def test_chunks_go_after_the_decodes(depth: int) -> None:
    scheduler = Scheduler(BlockPool(40, 8), limits(chunked=True, max_tokens=10))
    scheduler.add(sequence("short", 3, 9))
    scheduler.add(sequence("long", 30, 2))
    plans = run(scheduler, depth)
    shapes = [(len(p.decodes), [c.num_tokens for c in p.prefills]) for p in plans]
    assert shapes[:5] == [(0, [3, 7]), (1, [9]), (1, [9]), (1, [5]), (2, [])]


@pytest.mark.parametrize("depth", [0, 1])
def test_steps_of_prompts_are_full(depth: int) -> None:
    """Without chunked prefill too: the last prompt of a step is cut; the first is not, however long."""
    scheduler = Scheduler(BlockPool(40, 8), limits(max_prefill_seqs=4, max_decode_seqs=5, max_tokens=10))
    for name, length in {"a": 4, "b": 4, "c": 4, "long": 30, "d": 7}.items():
        scheduler.add(sequence(name, length, 2))
    plans = run(scheduler, depth)
    shapes = [(len(p.decodes), [c.num_tokens for c in p.prefills]) for p in plans]
    assert shapes == [(0, [4, 4, 2]), (0, [2, 8]), (0, [22]), (0, [7]), (5, [])]


@pytest.mark.parametrize("depth", [0, 1])
def test_everybody_progresses_when_blocks_run_out(depth: int) -> None:
    """Six that each need nearly the whole pool: preempted a bounded number of times, and all finish."""
    scheduler = Scheduler(BlockPool(9, 4), limits(max_decode_seqs=6, max_prefill_seqs=6))
    all_of_them = [sequence(str(i), 5, 26) for i in range(6)]
    for s in all_of_them:
        scheduler.add(s)
    run(scheduler, depth)
    assert scheduler.num_preemptions > 0
    assert max(s.num_preempted for s in all_of_them) <= MAX_PREEMPTIONS
    assert [num_generated(s) for s in all_of_them] == [26] * 6


def test_the_oldest_is_never_preempted() -> None:
    scheduler = Scheduler(BlockPool(9, 4), limits(max_decode_seqs=6, max_prefill_seqs=6))
    all_of_them = [sequence(str(i), 5, 26) for i in range(6)]
    for s in all_of_them:
        scheduler.add(s)
    run(scheduler)
    assert all_of_them[0].num_preempted == 0


def test_hits_come_in_units_and_leave_the_last_token() -> None:
    scheduler = Scheduler(BlockPool(100, 4), limits(prefix_unit=8))
    found = []
    for length in (32, 32, 33, 31, 9, 8, 40):
        s = sequence("x", length, 1)
        s.token_ids = s.prompt_ids = list(range(length))
        scheduler.add(s)
        run(scheduler)
        found.append(s.num_cached)
    assert found == [0, 24, 32, 24, 8, 0, 32]


def test_salts_and_requests_that_must_not_share() -> None:
    scheduler = Scheduler(BlockPool(100, 4), limits(prefix_unit=4))
    cached = []
    for key in (root_key("a"), root_key("b"), None, root_key("a"), root_key("\ud800"), root_key("b")):
        s = sequence("x", 20, 1, cache_key=key)
        scheduler.add(s)
        run(scheduler)
        cached.append(s.num_cached)
    assert cached == [0, 0, 0, 16, 0, 16]


def test_what_changes_kv_from_a_position_on_is_shared_before_it_alone() -> None:
    scheduler = Scheduler(BlockPool(100, 4), limits(prefix_unit=4))
    cached = []
    for extra in ({}, {0: "adapter"}, {9: "cat"}, {9: "dog"}, {10: "cat"}, {9: "cat"}, {0: "adapter"}, {}):
        s = sequence("x", 20, 1, extra_keys=extra)
        scheduler.add(s)
        run(scheduler)
        cached.append(s.num_cached)
    assert cached == [0, 0, 8, 8, 8, 16, 16, 16]


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    assert root_key("ab", "c") != root_key("a", "bc")
    assert next_key(b"", [1], ["ab"]) != next_key(b"", [1], ["a", "b"])


def test_a_row_may_bring_several_tokens_and_those_after_its_end_are_dropped() -> None:
    scheduler = Scheduler(BlockPool(100, 8), limits())
    stops, fills = sequence("stops", 3, 20), sequence("fills", 3, 4)
    for s in (stops, fills):
        scheduler.add(s)
    plan, rows = scheduler.schedule()
    assert scheduler.collect(plan, rows, [[1, 2], [1]]) == [(0, [1, 2]), (1, [1])]
    assert (stops.num_computed, fills.num_computed) == (4, 3)
    plan, rows = scheduler.schedule()
    assert [chunk.position for chunk in plan.decodes] == [4, 3], "the next token is the last that came"
    brought = scheduler.collect(plan, rows, [[3, STOP, 4], [1, 2, 3, 4]])
    assert brought == [(0, [3, STOP]), (1, [1, 2, 3])]
    assert (stops.finish_reason, fills.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    scheduler.check()
    assert scheduler.is_idle


def test_a_sequence_moves_from_state_to_state() -> None:
    scheduler = Scheduler(BlockPool(100, 4), limits(chunked=True, max_tokens=8))
    s = sequence("x", 12, 5)
    scheduler.add(s)
    states, in_flight = [s.state], deque[tuple[StepPlan, list[Sequence]]]()
    for _ in range(2):
        in_flight.append(scheduler.schedule())
        states.append(s.state)
    scheduler.finish(s, FinishReason.ABORT)
    states.append(s.state)
    while in_flight:
        scheduler.collect(*in_flight.popleft(), [[1]])
    states.append(s.state)
    assert states == [State.WAITING, State.PREFILLING, State.DECODING, State.ENDING, State.ENDED]
    for state in (State.WAITING, State.IN_TRANSFER, State.DECODING):
        with pytest.raises(AssertionError, match="from ENDED"):
            s.move_to(state)


def test_no_step_takes_in_a_sequence_in_transfer() -> None:
    scheduler = Scheduler(BlockPool(100, 4), limits())
    s = sequence("x", 12, 5)
    scheduler.add(s)
    scheduler.collect(*scheduler.schedule(), [[1]])
    s.move_to(State.IN_TRANSFER)
    assert scheduler.schedule()[1] == []
    scheduler.check()
    s.move_to(State.DECODING)
    assert scheduler.schedule()[1] == [s]


def test_when_devices_are_lost_nothing_is_held_or_found() -> None:
    """Two steps are in flight, and will never be read."""
    scheduler = Scheduler(BlockPool(20, 4), limits(prefix_unit=4))
    first, second = sequence("a", 8, 4), sequence("b", 9, 4)
    scheduler.add(first)
    plan, rows = scheduler.schedule()
    scheduler.collect(plan, rows, [[1]])
    scheduler.add(second)
    steps = [scheduler.schedule()[1] for _ in range(2)]
    assert all(steps)
    for one in (first, second):
        scheduler.finish(one, FinishReason.ERROR)
    for rows in steps:
        scheduler.check()
        scheduler.abandon(rows)
    assert scheduler.pool.num_cached
    scheduler.pool.forget()
    scheduler.check()
    scheduler.check_idle()
    assert not scheduler.pool.num_cached


def test_the_longest_unused_prefix_is_given_up_first() -> None:
    scheduler = Scheduler(BlockPool(11, 4), limits(prefix_unit=4))

    def cached(first: int) -> int | None:
        s = sequence("x", 13, 1)
        s.token_ids = s.prompt_ids = [first] * 13
        scheduler.add(s)
        run(scheduler)
        return s.num_cached

    assert [cached(1), cached(2), cached(1)] == [0, 0, 12]
    assert cached(3) == 0  # takes the place of 2
    assert [cached(1), cached(3)] == [12, 12]


def test_who_was_preempted_often_keeps_what_it_gets() -> None:
    scheduler = Scheduler(BlockPool(13, 4), limits())
    older, often = sequence("older", 5, 30), sequence("often", 5, 20, num_preempted=MAX_PREEMPTIONS)
    for s in (older, often):
        scheduler.add(s)
    plan, rows = scheduler.schedule()
    assert len(often.blocks) == 7, "blocks for its longest life at once"
    scheduler.collect(plan, rows, [[1], [1]])
    run(scheduler)
    assert (often.num_preempted, older.num_preempted) == (MAX_PREEMPTIONS, 1)
    assert (num_generated(older), num_generated(often)) == (30, 20)
