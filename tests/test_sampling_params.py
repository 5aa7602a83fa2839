"""A value that could harm a step never exists: every field refuses what is not of its type and range."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import SamplingParams, StructuredOutputs

NAN, INF = float("nan"), float("inf")
HUGE = [2**63, 2**64, 10**5000, 1e308]
NO_NUMBERS: list[Any] = ["1", None, True, [], {}, NAN, INF, -INF, *HUGE]
NO_COUNTS: list[Any] = ["1", True, [], {}, 1.5, 1.0, NAN, INF, *HUGE]
NUMBERS = [
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
]
COUNTS = ["n", "best_of", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"]


def refused(**values: Any) -> str:
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**values)
    assert error.value.param == next(iter(values))
    assert len(str(error.value)) < 300
    assert str(error.value).isprintable()
    return str(error.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    for value in [*NO_NUMBERS, -3, 101]:
        refused(**{name: value})
    assert "must be a number" in refused(**{name: -3})


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    for value in [*NO_COUNTS, -(2**70), *([-2] if name != "seed" else [])]:
        refused(**{name: value})


def test_edges_that_are_taken() -> None:
    SamplingParams(temperature=-0.0, top_p=1, min_p=1, typical_p=1, top_k=-1, seed=-(2**63), max_tokens=None)
    SamplingParams(temperature=5e-324, top_p=1e-30, n=128, logprobs=20, min_tokens=16)
    for name in ("top_p", "typical_p", "repetition_penalty"):
        refused(**{name: 0})


def test_lists() -> None:
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"], stop_token_ids=[1]).stop == ("x", "y")
    for value in ([""], [1], ["a"] * 65, ["x" * 70_000], 5, [None], ["a\ud800"]):
        refused(stop=value)
        refused(bad_words=value)
    for value in ([-1], [2**31], ["1"], [True], [1.0], 5, list(range(1025))):
        refused(stop_token_ids=value)
    for value in ([], [-1], [None]):
        refused(allowed_token_ids=value)


def test_bias() -> None:
    assert SamplingParams(logit_bias={"5": 1, 6: 500}).logit_bias == {5: 1.0, 6: 100.0}
    for value in (
        {"x": 1},
        {-1: 1},
        {5: NAN},
        {5: "1"},
        {5: True},
        {"9" * 30: 1},
        [1],
        dict.fromkeys(range(1025), 1),
    ):
        refused(logit_bias=value)


def test_together() -> None:
    assert "less than n" in refused(best_of=1, n=2)
    assert "more than max_tokens" in refused(min_tokens=17)
    refused(truncate_prompt_tokens=0)
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"json": "{}", "regex": "a"},
        {"json": ""},
        {"json": 5},
        {"json_object": 1},
        {"choice": [1]},
        {"choice": ["a"] * 2000},
        {"regex": "a" * (1 << 20 | 1)},
        {"grammar": None},
        {"regex": "\udc00"},
        {"json": '{"const": "\ud800"}'},
        {"grammar": 'start: "\ud800"'},
        {"choice": ["a", "\ud800"]},
    ],
)
def test_structured_outputs(values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as error:
        StructuredOutputs(**values)
    assert error.value.param == "structured_outputs"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.sampled_from([*SamplingParams.__dataclass_fields__]), ANYTHING, max_size=4))
def test_nothing_but_a_refusal_comes_of_anything(values: dict[str, Any]) -> None:
    try:
        params = SamplingParams(**values)
    except InvalidRequest:
        return
    assert 0 <= params.temperature <= 100
    assert params.num_choices >= params.n >= 1
