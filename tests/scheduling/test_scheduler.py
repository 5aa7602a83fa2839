"""The scheduler alone: who comes when, with which tokens, and which blocks are shared."""

from __future__ import annotations

from collections import deque

import pytest

from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling.blocks import BlockPool, next_key, root_key
from hex_llm.scheduling.limits import StepLimits
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
