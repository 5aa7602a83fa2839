"""What steps may hold, how long they take, and what follows from both for who runs when."""

from __future__ import annotations

import random

import pytest

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.scheduling.blocks import BlockPool
from hex_llm.scheduling.limits import StepLimits, StepTimes, prefix_unit
from hex_llm.scheduling.scheduler import MAX_PASSED_S, Scheduler
from hex_llm.types import Chunk, StepPlan
from tests.scheduling.test_scheduler import limits, run, sequence

TIMES = {1: 0.01, 100: 0.01, 1000: 0.1}  # seconds by tokens: 0.1 ms each once there are many


def test_what_is_not_given_is_chosen_for_the_platform() -> None:
    def of(platform: str, free_gib: int | None = None, **flags: object) -> StepLimits:
        free = None if free_gib is None else free_gib << 30
        return StepLimits.of(EngineConfig(**flags), 4096, platform, free)  # type: ignore[arg-type]

    assert of("gpu", 100).max_decode_seqs == 1024
    assert of("gpu", 10).max_decode_seqs == 256
    assert of("gpu", 100, max_num_batched_tokens=512).max_decode_seqs == 512
    assert of("gpu", 100, max_decode_seqs=7).max_decode_seqs == 7
    assert of("cpu").chunked
    assert not of("cpu", enable_chunked_prefill=False).chunked
    assert of("cpu", enable_chunked_prefill=False, max_prefill_seqs=2).max_tokens == 2 * 4096
    assert of("tpu", target_step_ms=7).target_s == 0.007
    assert (of("gpu", 100).target_s, of("gpu", 10).target_s) == (0.077, 0.1)
    assert of("cpu", max_decode_seqs=2000).max_tokens > 2000, "decodes leave room for prompts"
    with pytest.raises(ConfigError, match="max_num_batched_tokens=8: must be at least"):
        of("cpu", max_num_batched_tokens=8, max_decode_seqs=9)


def test_what_prefix_cache_hits_are_counted_in() -> None:
    flags = EngineConfig(enable_prefix_cache_hbm=True, prefill_len_padding=100, block_size=8)
    assert prefix_unit(flags) == 200
    per_block = EngineConfig(enable_prefix_cache_hbm=True, prefix_cache_unit="block")
    assert prefix_unit(per_block) == 32
    assert prefix_unit(EngineConfig()) == 32, "what is not given is chosen for speed"
    assert prefix_unit(EngineConfig(enable_prefix_cache_hbm=True)) == 512, "what is given is as documented"
    assert prefix_unit(EngineConfig(enable_prefix_cache_hbm=False)) is None


def test_step_times() -> None:
    times = StepTimes(TIMES)
    assert times.tokens_within(0.009) == 0
    assert times.tokens_within(0.01) == 100
    assert times.tokens_within(0.055) == 550
    assert times.tokens_within(0.2) == 2000
    assert times.weight(5000) == 1


def test_what_keys_cost_is_learned() -> None:
    """Also from steps that have next to none, whose time is something else's."""
    times, rng = StepTimes(TIMES), random.Random(0)
    for i in range(300):
        length, num_tokens, position = rng.randrange(2000), rng.choice([1, 10, 100]), rng.randrange(10_000)
        chunk = Chunk(2, position, num_tokens, (), 0, True)
        plan = StepPlan((Chunk(1, length, 1, (), 0, True),) * 100, (chunk,) * (i % 3))
        decode_keys, chunk_keys = 100 * (length + 1), num_tokens * (position + chunk.end) // 2 * (i % 3)
        seconds = 0.002 + decode_keys * 1e-7 + chunk_keys * 1e-8
        times.observe(plan, 500, times.seconds(500) + seconds + rng.gauss(0, 1e-3))
    assert times.tokens_within(0.057, 200_000) == pytest.approx(350, abs=10)
    assert times.weight(10_000) == pytest.approx(2, abs=0.1), "a token there takes twice as long"


def timed(**changes: object) -> tuple[Scheduler, list[float]]:
    """A scheduler and its clock."""
    now = [0.0]
    scheduler = Scheduler(BlockPool(1000, 8), limits(chunked=True, **changes), clock=lambda: now[0])
    scheduler.times = StepTimes(TIMES)
    return scheduler, now


def test_steps_keep_within_their_time_while_someone_decodes() -> None:
    scheduler, _ = timed(target_s=0.05, max_tokens=900)

    def sizes() -> list[int]:
        return [sum(chunk.num_tokens for chunk in plan.chunks) for plan in run(scheduler, depth=1)]

    scheduler.add(sequence("alone", 3000, 4))
    assert sizes()[0] == 900, "nobody decodes"
    scheduler.add(sequence("decodes", 4, 40))
    scheduler.add(sequence("long", 3000, 4))
    assert max(sizes()) == 500


def test_what_does_not_fill_a_step_is_left_to_the_next_if_it_ends_sooner_there() -> None:
    """A step of 540 tokens would be padded to 1000, which takes longer than 500 and then 40."""
    scheduler, _ = timed(step_sizes=(1, 8, 64, 500, 1000))
    scheduler.add(sequence("a", 540, 1))
    assert [plan.prefills[0].num_tokens for plan in run(scheduler)] == [500, 40]
    scheduler.add(sequence("b", 990, 1))
    assert [plan.prefills[0].num_tokens for plan in run(scheduler)] == [990]
    scheduler.times = None
    scheduler.add(sequence("c", 540, 1))
    assert [plan.prefills[0].num_tokens for plan in run(scheduler)] == [540]


@pytest.mark.parametrize(("num_decodes", "first"), [(60, 440), (0, 445)])
def test_one_prompt_ends_later_if_many_others_gain_by_it(num_decodes: int, first: int) -> None:
    """Of 60 + 445 tokens 5 would make a step of 600 out of one of 500; of 445 alone nobody would gain."""
    many = {"max_decode_seqs": 100, "max_prefill_seqs": 100}
    scheduler, _ = timed(step_sizes=(1, 8, 64, 128, 440, 500, 600), target_s=1.0, **many)
    for i in range(num_decodes):
        scheduler.add(sequence(str(i), 1, 40))
    run_steps(scheduler, 1)
    scheduler.add(sequence("prompt", 445, 4))
    plan, _ = scheduler.schedule()
    assert (len(plan.decodes), plan.prefills[0].num_tokens) == (num_decodes, first)


def test_a_step_is_filled_rather_than_padded() -> None:
    """Tokens that see many keys count more, so fewer fit into its time; but padding takes as long as they."""
    scheduler, _ = timed(step_sizes=(1, 8, 64, 300, 400, 500, 1000), target_s=0.05, max_tokens=900)
    assert scheduler.times is not None
    for position in (0, 10_000) * 50:  # as long again for each 10,000 keys
        chunk = Chunk(2, position, 100, (), 0, True)
        scheduler.times.observe(StepPlan((), (chunk,)), 100, 0.01 + 100 * (position + 50) * 1e-8)
    scheduler.add(sequence("decodes", 4, 40))
    scheduler.add(sequence("long", 6000, 4))
    sizes = [sum(chunk.num_tokens for chunk in plan.chunks) for plan in run(scheduler, depth=1)]
    assert set(sizes[1 : sizes.index(300, 1)]) == {400}
    assert sizes[sizes.index(300, 1) :][:9] == [300] * 9, "fewer, the more there are before them"


def test_short_prompts_pass_a_long_one() -> None:
    scheduler, now = timed(target_s=0.05, max_prefill_seqs=3, max_tokens=500)
    scheduler.add(long := sequence("long", 3000, 4))
    run_steps(scheduler, 2)
    now[0] = 0.1
    scheduler.add(sequence("short", 20, 4))
    scheduler.add(sequence("another", 30, 4))
    plan, rows = scheduler.schedule()
    assert [s.request_id for s in rows] == ["short", "another"]
    scheduler.collect(plan, rows, [[1]] * 2)
    run(scheduler)
    assert long.finish_reason is not None


def test_a_step_ends_with_a_prompt_whose_first_token_is_sooner_by_that() -> None:
    """Unless many wait for one step more; and what would be padding is taken of the next."""
    most = {"max_prefill_seqs": 8, "max_decode_seqs": 8, "max_tokens": 2048}
    scheduler, _ = timed(step_sizes=(1, 128, 1024, 2048), **most)
    for num_behind in (1, 5):
        for i in range(1 + num_behind):
            scheduler.add(sequence(str(i), 900 if i else 100, 1))
        first = [chunk.num_tokens for chunk in run(scheduler)[0].prefills]
        assert first == ([100, 28] if num_behind == 1 else [100, 900, 24])
    scheduler.times = None
    for i in range(2):
        scheduler.add(sequence(str(i), 900 if i else 100, 1))
    assert [len(plan.prefills) for plan in run(scheduler)] == [2]


def test_no_prompt_is_passed_for_ever() -> None:
    scheduler, now = timed(max_prefill_seqs=1, max_tokens=1000)
    scheduler.add(long := sequence("long", 1000, 1))
    for i in range(200):
        now[0] = i * 0.05
        scheduler.add(sequence(str(i), 10, 1))
        scheduler.add(sequence(f"{i} again", 10, 1))
        run_steps(scheduler, 1)
        if long.finish_reason is not None:
            break
    assert 0.05 < now[0] < MAX_PASSED_S


def run_steps(scheduler: Scheduler, num_steps: int) -> None:
    for _ in range(num_steps):
        plan, rows = scheduler.schedule()
        scheduler.collect(plan, rows, [[1]] * len(rows))
