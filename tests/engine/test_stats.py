"""What an engine tells of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hex_llm.engine.stats import Stats, Work
from hex_llm.kernels.attention import Mask
from hex_llm.models.spec import Experts, Layer, ModelSpec
from hex_llm.types import Chunk
from tests.engine.driving import drive, make_engine, request
from tests.tiny import FAMILIES


def test_an_engine_tells_what_it_does(tmp_path: Path) -> None:
    tiny = next(one for one in FAMILIES if one.name == "llama3")
    tiny.save(tmp_path)
    engine = make_engine(
        tmp_path, enable_prefix_cache_hbm=True, prefix_cache_unit="block", block_size=8, recompile="warn"
    )
    seen: list[Stats] = []
    prompt = (tiny.prompt(0) * 10)[:40]
    drive(engine, [request("a", prompt), request("b", prompt)], lambda _: seen.append(engine.stats))
    seen.append(engine.stats)
    assert max(one.num_running for one in seen) == 2
    assert (seen[-1].num_running, seen[-1].num_waiting) == (0, 0)
    assert (seen[-1].num_blocks, seen[-1].num_free_blocks) == (64, 64)
    assert min(one.num_free_blocks for one in seen) < 64
    assert [name for one in seen for name, _ in one.waited] == ["a", "b"]
    assert all(0 <= seconds < 60 for one in seen for _, seconds in one.waited)
    assert (seen[-1].num_prefix_queries, seen[-1].num_prefix_hits) == (80, 32)
    # The last token of each is chosen, but never taken in.
    assert sum(one.num_tokens for one in seen) == 40 + 8 + 2 * 15
    assert seen[-1].num_padding > 0
    assert seen[-1].num_cached_blocks == (40 + 15) // 8  # both say the same
    assert seen[-1].num_flops > (40 + 8 + 2 * 15) * Work.of(engine.spec).per_token > 0
    assert all(one.dispatch_s > 0 for one in seen if one.num_tokens)
    assert any(one.wait_s > 0 for one in seen)


# A model of SmolLM2's shape, but for its experts, and how many weights its layers and its head have.
DENSE = Layer(None, ffn_size=1536)
SPEC = ModelSpec("llama", 49152, 576, 9, 3, 64, (DENSE,) * 30, 8192, 1e-5)
IN_LAYERS, IN_HEAD = 30 * (576 * 64 * (9 + 3 + 3 + 9) + 3 * 576 * 1536), 576 * 49152


def chunk(position: int, num_tokens: int, *, samples: bool = True) -> Chunk:
    return Chunk(0, position, num_tokens, [], 0, samples)


@pytest.mark.parametrize(("position", "num_tokens"), [(0, 1), (100, 1), (0, 64), (1000, 512)])
def test_work_is_two_operations_for_each_weight_and_what_attention_takes(
    position: int, num_tokens: int
) -> None:
    seen = sum(range(position + 1, position + num_tokens + 1))
    expected = 2 * IN_LAYERS * num_tokens + 4 * 30 * 9 * 64 * seen
    work = Work.of(SPEC)
    assert work.in_step([chunk(position, num_tokens, samples=False)]) == expected
    assert work.in_step([chunk(position, num_tokens)] * 2) == 2 * (expected + 2 * IN_HEAD)


def test_layers_that_look_back_less_far_have_less_work() -> None:
    half = replace(DENSE, mask=Mask(window=50))
    work = Work.of(replace(SPEC, layers=(DENSE, half) * 15))
    assert Work.of(SPEC).in_step([chunk(99, 1)]) - work.in_step([chunk(99, 1)]) == 4 * 15 * 9 * 64 * 50
    assert Work.of(SPEC).in_step([chunk(49, 1)]) == work.in_step([chunk(49, 1)])


def test_only_the_experts_that_a_token_visits_have_work() -> None:
    sparse = Layer(None, experts=Experts(num=8, num_per_token=2, size=512, shared_size=512))
    dense = Layer(None, ffn_size=3 * 512)
    one, other = (Work.of(replace(SPEC, layers=(layer,))).per_token for layer in (sparse, dense))
    assert one - other == 2 * 576 * 8  # who chooses them
