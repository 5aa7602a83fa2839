"""What a request may ask of an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hex_llm.admission import Limits, check_request, make_request, max_len_of
from hex_llm.config import EngineConfig
from hex_llm.errors import InvalidRequest
from hex_llm.frontend.client import EngineClient
from hex_llm.sampling_params import SamplingParams, StructuredOutputs
from hex_llm.types import Request

EOS, STOP = 2, 7
LIMITS = Limits(vocab_size=10, max_len=131_072, max_blocks=4, block_size=16, reads_text=True, eos_ids=(EOS,))
PROMPT = [5] * 10


def made(limits: Limits = LIMITS, bad_word_ids: list[list[int]] | None = None, **params: Any) -> Request:
    request = Request("r", PROMPT, SamplingParams(**params), bad_word_ids=bad_word_ids or [])
    check_request(request, limits)
    return request


# ---- a KV cache that holds less than the context


def test_who_names_no_length_gets_what_fits() -> None:
    assert max_len_of(made(max_tokens=None), LIMITS) == LIMITS.longest == 64
    assert max_len_of(made(max_tokens=54), LIMITS) == 64
    roomy = replace(LIMITS, max_len=50)
    assert max_len_of(made(roomy, max_tokens=None), roomy) == roomy.longest == 50


def test_servers_tell_what_fits() -> None:
    client = EngineClient(EngineConfig())
    client.limits = LIMITS
    assert client.max_len == 64


@pytest.mark.parametrize(
    ("params", "param"),
    [({"max_tokens": 55}, "max_tokens"), ({"max_tokens": None, "min_tokens": 55}, "min_tokens")],
)
def test_a_length_that_cannot_fit_is_refused(params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=r"there are only 4|may have 64") as refused:
        made(**params)
    assert refused.value.param == param


def test_prompts_are_measured_by_what_fits() -> None:
    with pytest.raises(InvalidRequest, match="together may have 64"):
        make_request("r", [5] * 64, SamplingParams(max_tokens=None), LIMITS)
    cut = SamplingParams(max_tokens=10, truncate_prompt_tokens=-1)
    assert len(make_request("r", [5] * 1000, cut, LIMITS).prompt_ids) == 54
    with pytest.raises(InvalidRequest, match="than a prompt may have, 63"):
        make_request("r", PROMPT, SamplingParams(truncate_prompt_tokens=64), LIMITS)


# ---- masks


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("allowed_token_ids", {"allowed_token_ids": [EOS], "min_tokens": 1}),
        ("allowed_token_ids", {"allowed_token_ids": [EOS, STOP], "stop_token_ids": [STOP], "min_tokens": 3}),
        ("allowed_token_ids", {"allowed_token_ids": [3, 4], "bad_word_ids": [[3], [4], [5, 6]]}),
        ("allowed_token_ids", {"allowed_token_ids": [3, EOS], "bad_word_ids": [[3]], "min_tokens": 1}),
        ("bad_words", {"bad_word_ids": [[i] for i in range(10)]}),
        ("bad_words", {"bad_word_ids": [[i] for i in range(10) if i != EOS], "min_tokens": 1}),
    ],
)
def test_masks_that_allow_nothing_are_refused(param: str, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="every token") as refused:
        made(**params)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [EOS, 3], "min_tokens": 1},
        {"allowed_token_ids": [3], "bad_word_ids": [[3, 4]]},
        {"bad_word_ids": [[i] for i in range(9)]},
        {
            "allowed_token_ids": [EOS],
            "min_tokens": 1,
            "structured_outputs": StructuredOutputs(json_object=True),
        },
    ],
)
def test_masks_that_allow_something(params: dict[str, Any]) -> None:
    made(**params)


# ---- replies that would fill the memory


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"logprobs": 20, "n": 128, "max_tokens": None}, "logprobs"),
        ({"prompt_logprobs": 20, "n": 128, "max_tokens": 1}, "prompt_logprobs"),
    ],
)
def test_log_probabilities_are_bounded_in_all(params: dict[str, Any], param: str) -> None:
    roomy = replace(LIMITS, max_blocks=100_000)
    prompt = [5] * 4000
    with pytest.raises(InvalidRequest, match="in all") as refused:
        make_request("r", prompt, SamplingParams(**params), roomy)
    assert refused.value.param == param
    make_request("r", prompt, SamplingParams(**{**params, "n": 1}), roomy)
    make_request("r", prompt, SamplingParams(**{**params, param: 0}), roomy)


def test_fewer_log_probabilities_may_be_told() -> None:
    few = replace(LIMITS, max_logprobs=2)
    for name in ("logprobs", "prompt_logprobs"):
        make_request("r", [1, 2], SamplingParams(**{name: 2}), few, None)
        with pytest.raises(InvalidRequest, match=f"{name}: more than 2 .*--max_logprobs"):
            make_request("r", [1, 2], SamplingParams(**{name: 3}), few, None)


def test_a_prompt_cut_on_either_side() -> None:
    for side, kept in (("left", [3, 4]), ("right", [1, 2])):
        params = SamplingParams(truncate_prompt_tokens=2, truncation_side=side)
        assert make_request("r", [1, 2, 3, 4], params, LIMITS, None).prompt_ids == kept
