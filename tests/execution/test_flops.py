"""Operations counted from a model's shape, against the number of its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hex_llm.execution.flops import Work
from hex_llm.kernels.attention import Mask
from hex_llm.models.spec import Experts, Layer, ModelSpec
from hex_llm.types import Chunk

# A model of SmolLM2's shape, but for its experts, and how many weights see every token, and the others.
DENSE = Layer(None, ffn_size=1536)
SPEC = ModelSpec("llama", 49152, 576, 9, 3, 64, (DENSE,) * 30, 8192, 1e-5)
IN_LAYERS, AT_END = 30 * 576 * 64 * (9 + 3 + 3 + 9) + 29 * 3 * 576 * 1536, 3 * 576 * 1536 + 576 * 49152


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
    assert work.in_step([chunk(position, num_tokens)] * 2) == 2 * (expected + 2 * AT_END)


def test_layers_that_look_back_less_far_have_less_work() -> None:
    half = replace(DENSE, mask=Mask(window=50))
    work = Work.of(replace(SPEC, layers=(DENSE, half) * 15))
    assert Work.of(SPEC).in_step([chunk(99, 1)]) - work.in_step([chunk(99, 1)]) == 4 * 15 * 9 * 64 * 50
    assert Work.of(SPEC).in_step([chunk(49, 1)]) == work.in_step([chunk(49, 1)])


def test_only_the_experts_that_a_token_visits_have_work() -> None:
    sparse = Layer(None, experts=Experts(num=8, num_per_token=2, size=512, shared_size=512))
    dense = Layer(None, ffn_size=3 * 512)
    one, other = (Work.of(replace(SPEC, layers=(layer,) * 2)).per_token for layer in (sparse, dense))
    assert one - other == 2 * 576 * 8  # who chooses them
