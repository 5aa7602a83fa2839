"""Absurd configs: each is refused in one line that names what is wrong, at once and in little memory."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.errors import ModelError
from hex_llm.models.families import FAMILIES, model_spec
from hex_llm.models.hf_config import LIMITS
from hex_llm.models.params import abstract_weights

BASE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2],
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "sliding_window": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size_per_layer_input": 0,
}
QWEN = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
LLAMA4 = {"architectures": ["Llama4ForCausalLM"]}
MIXTRAL = {"architectures": ["MixtralForCausalLM"]}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"]}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"]}
VISION = {"architectures": ["Llama4ForConditionalGeneration"]}
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]


def config(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **BASE, **changes}


def rope(kind: Any, **values: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **values}}


def refusal(values: dict[str, Any]) -> str:
    start = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        model_spec(values)
    assert time.perf_counter() - start < 10
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_base_is_good(architecture: str) -> None:
    spec = model_spec(config(architectures=[architecture], text_config=BASE))
    assert (spec.num_heads, len(spec.layers), spec.eos_ids) == (4, 4, (1, 2))


SIZES = ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_size_is_named(key: str) -> None:
    values = config()
    del values[key]
    assert f"lacks {key}" in refusal(values)
    assert f"lacks {key}" in refusal(config(**{key: None}))


@pytest.mark.parametrize(
    "value", [0, -1, 1 << 31, 10**9, 10**30, math.nan, math.inf, 2.0, True, "8", [8], {}, DEEP]
)
@pytest.mark.parametrize("key", [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_a_wrong_size_is_named_with_its_limit(key: str, value: Any) -> None:
    assert refusal(config(**{key: value})).startswith(f"config.json: {key}=")
    assert str(LIMITS[key]) in refusal(config(**{key: value}))


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 0, -1.0, 1e-300, 1e300, 10**400, True, "1", [1.0], DEEP]
)
@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "partial_rotary_factor"])
def test_a_wrong_number_is_named(key: str, value: Any) -> None:
    assert refusal(config(**{key: value})).startswith(f"config.json: {key}=")


LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "5 attention heads cannot share 2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, "4 attention heads cannot share 8"),
        ({"head_dim": 7}, "even number of dimensions, not 7 of 7"),
        ({"head_dim": 1}, "even number"),
        ({"partial_rotary_factor": 0.4}, "not 3 of 8"),
        ({"partial_rotary_factor": 1.5}, "not 12 of 8"),
        ({"partial_rotary_factor": 0.1}, "not 0 of 8"),
        ({"hidden_act": "relu"}, "'relu' is unknown; known are silu"),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu'] must be a text"),
        ({"model_type": DEEP}, "model_type="),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"attention_bias": 1}, "must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"eos_token_id": [1, -2]}, "eos_token_id="),
        ({"eos_token_id": [[1]]}, "eos_token_id="),
        ({"eos_token_id": 1.5}, "eos_token_id="),
        ({"eos_token_id": True}, "eos_token_id="),
        ({"eos_token_id": 1 << 40}, "eos_token_id="),
        ({"eos_token_id": {"id": 1}}, "eos_token_id="),
        # rope
        (rope("yarnish"), "'yarnish' is unknown; known are default, linear"),
        (rope(["linear"]), "rope_type="),
        (rope(DEEP), "rope_type="),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": "linear"}, "rope_parameters must be an object"),
        (rope("linear"), "lacks factor"),
        (rope("linear", factor=-1), "factor="),
        (rope("linear", factor=1e20), "max_position_embeddings="),
        (rope("dynamic", factor=1e-20), "max_position_embeddings="),
        ({**rope("dynamic", factor=2.0), "head_dim": 2}, "at least 4 rotated"),
        (rope("llama3", factor=8.0), "lacks low_freq_factor"),
        (
            rope("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=3.0),
            "high_freq_factor must not be less",
        ),
        (rope("longrope", **{**LONG, "long_factor": [1.0] * 3}), "long_factor must be a list of 4"),
        (rope("longrope", **{**LONG, "short_factor": "x"}), "short_factor must be a list of 4"),
        (rope("longrope", **{**LONG, "short_factor": [1, 1, 1, 0]}), "short_factor=0.0"),
        (rope("longrope", **{**LONG, "short_factor": [1, 1, 1, math.nan]}), "short_factor=nan"),
        (rope("longrope", **{**LONG, "original_max_position_embeddings": 1}), "rope numbers"),
        (
            rope("longrope", **{**LONG, "original_max_position_embeddings": 0}),
            "original_max_position_embeddings=0",
        ),
        (rope("yarn", rope_theta=1, factor=2.0), "rope numbers"),
        (rope("yarn", factor=2.0, truncate="no"), "truncate="),
        # families
        ({**MIXTRAL, "num_experts_per_tok": 5}, "5 experts per token of only 4"),
        ({**MIXTRAL, "num_local_experts": 10**6}, "num_local_experts="),
        ({**MIXTRAL, "sliding_window": -1}, "sliding_window=-1"),
        ({**GEMMA4, "hidden_size_per_layer_input": None, "num_kv_shared_layers": 2}, "31B and 26B-A4B"),
        ({**GEMMA4, "hidden_size_per_layer_input": 256}, "31B and 26B-A4B"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "31B and 26B-A4B"),
        ({**GEMMA4, "global_head_dim": 1 << 20}, "head_dim="),
        ({**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3}, "cannot share 3"),
        ({**GEMMA4, "per_layer_config": {"3": [1]}}, "3 must be an object"),
        ({**GEMMA4, "per_layer_config": {"3": {"head_dim": 7}}}, "even number of dimensions, not 7"),
        ({**LLAMA4, "num_experts_per_tok": 5}, "5 experts per token of only 4"),
        ({**LLAMA4, "moe_layers": "all"}, "moe_layers='all'"),
        ({**LLAMA4, "moe_layers": {"0": 1}}, "moe_layers="),
        ({**LLAMA4, "moe_layers": [0, "1"]}, "moe_layers="),
        ({**LLAMA4, "no_rope_layers": [1, 1]}, "no_rope_layers must list 4"),
        ({**LLAMA4, "no_rope_layers": [1, 1, 1, 2]}, "no_rope_layers must list 4"),
        ({**LLAMA4, "no_rope_layer_interval": 0}, "no_rope_layer_interval=0"),
        ({**LLAMA4, "interleave_moe_layer_step": 0}, "interleave_moe_layer_step=0"),
        ({**LLAMA4, "attention_chunk_size": 1 << 31}, "attention_chunk_size="),
        ({**QWEN, "max_window_layers": "2"}, "max_window_layers='2'"),
        ({**QWEN, "max_window_layers": -1}, "max_window_layers=-1"),
        ({**QWEN, "layer_types": ["full_attention"]}, "layer_types must list 4 values"),
        ({**QWEN, "layer_types": ["linear_attention"] * 4}, "layer_types must list 4 values"),
        ({**QWEN, "layer_types": "full_attention"}, "layer_types must list 4 values"),
        ({**QWEN, "layer_types": [DEEP] * 4}, "layer_types must list 4 values"),
        ({**GEMMA2, "layer_types": 0}, "layer_types must list 4 values"),
        ({**GEMMA2, "hidden_activation": "tanh"}, "'tanh' is unknown"),
        ({**GEMMA2, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar="),
        ({**VISION, "text_config": [1]}, "text_config must be an object"),
        (VISION, "lacks num_hidden_layers"),
        # what is not served
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; the nearest by name is ",
        ),
        ({"architectures": ["x\n" * 9999]}, "is not supported"),
        ({"architectures": None}, "architecture None is not supported"),
        ({"architectures": []}, "architecture None is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architecture None is not supported"),
        ({"architectures": [["LlamaForCausalLM"]]}, "is not supported"),
        ({"architectures": [DEEP]}, "is not supported"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in refusal(config(**changes))


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [
        ("Gemma3nForCausalLM", "Gemma3ForCausalLM"),
        ("Qwen3NextForCausalLM", "Qwen3ForCausalLM"),
        ("Granite4ForCausalLM", "GraniteForCausalLM"),
    ],
)
def test_the_nearest_architecture_is_told(unknown: str, nearest: str) -> None:
    assert refusal(config(architectures=[unknown])).endswith(f"the nearest by name is {nearest}")


def test_the_largest_model_of_the_limits_takes_little_memory() -> None:
    largest = {**BASE, **LIMITS, "head_dim": 1024, "num_key_value_heads": 1024}
    tracemalloc.start()
    spec = model_spec({"architectures": ["MixtralForCausalLM"], **largest})
    abstract_weights(spec)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(spec.layers) == LIMITS["num_hidden_layers"]
    assert peak < 100 << 20


# ---- any value at any place

NUMBERS = (
    st.integers() | st.floats() | st.sampled_from([0, 1, -1, 1 << 31, 1 << 63, 10**9, 10**400, 1e-45, 1e38])
)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text(max_size=8)
    | st.sampled_from(["linear", "yarn", "longrope", "llama3"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
ROPE = [
    "rope_type",
    "type",
    "factor",
    "rope_theta",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
]
ROPE += ["original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "truncate"]
OTHERS = [
    "layer_types",
    "moe_layers",
    "no_rope_layers",
    "max_window_layers",
    "use_sliding_window",
    "rope_theta",
]
OTHERS += [
    "hidden_act",
    "attention_bias",
    "quantization_config",
    "text_config",
    "rope_scaling",
    "rope_parameters",
]
OTHERS += [
    "no_rope_layer_interval",
    "interleave_moe_layer_step",
    "floor_scale",
    "attn_scale",
    "use_qk_norm",
    "dtype",
]
KINDS = st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
FACTORS = st.lists(st.floats(1e-9, 1e9), min_size=4, max_size=4)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    values = {**BASE, "architectures": [draw(st.sampled_from(list(FAMILIES)))], "text_config": dict(BASE)}
    if draw(st.booleans()):
        scaling = {"rope_type": draw(KINDS), "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling |= {"short_factor": draw(FACTORS), "long_factor": draw(FACTORS)}
        scaling |= draw(st.dictionaries(st.sampled_from(ROPE), JSON, max_size=3))
        values["rope_scaling"] = values["text_config"]["rope_scaling"] = scaling
    changes = draw(st.dictionaries(st.sampled_from([*BASE, *OTHERS]), JSON, max_size=3))
    values["text_config"] |= changes
    return values | changes


@settings(max_examples=400, deadline=1000)
@given(values=mutated())
def test_mutations_are_refused_or_sane(values: dict[str, Any]) -> None:
    try:
        spec = model_spec(values)
    except ModelError as error:
        message = str(error)
    else:
        message = ""
        assert 1 <= spec.max_len <= LIMITS["max_position_embeddings"]
        frequencies = [f for layer in spec.layers if layer.rope for f in layer.rope.inv_freq]
        assert all(math.isfinite(f) for f in frequencies)
        abstract_weights(spec)
    assert len(message) < 300
    assert message.isprintable()


@settings(max_examples=200, deadline=1000)
@given(values=st.dictionaries(st.sampled_from([*BASE, "architectures", *OTHERS]), JSON))
def test_any_object_is_a_model_error(values: dict[str, Any]) -> None:
    assert refusal(json.loads(json.dumps(values)))
