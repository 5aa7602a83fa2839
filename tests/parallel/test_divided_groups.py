"""Query heads that do not divide by the devices: groups filled up with heads whose weights are zeros."""

from __future__ import annotations

from pathlib import Path

import pytest

from hex_llm import LLM, SamplingParams
from hex_llm.models.params import LayerWeights
from tests.tiny import LLAMA4, Tiny, greedy_tokens

HEADS = {"num_attention_heads": 10, "num_key_value_heads": 2}
CASES = [
    Tiny("llama4", "Llama4ForCausalLM", {**LLAMA4, **HEADS, "head_dim": 8}),
    Tiny("with-biases", "Qwen2ForCausalLM", {**HEADS, "hidden_size": 80}),
    Tiny("fused", "Phi3ForCausalLM", {**HEADS, "hidden_size": 80}),
]


@pytest.mark.parametrize(
    "tiny",
    [CASES[0], *(pytest.param(tiny, marks=pytest.mark.slow) for tiny in CASES[1:])],
    ids=lambda tiny: tiny.name,
)
def test_groups_of_five_over_twice_as_many_devices(tiny: Tiny, tmp_path: Path) -> None:
    expected = greedy_tokens(tiny.save(tmp_path), tiny.prompt(), 24)
    flags = {"dtype": "float32", "max_model_len": 64, "num_blocks": 16, "skip_tokenizer_init": True}
    llm = LLM(model=tmp_path, tensor_parallel_size=4, **flags)
    layer: LayerWeights = llm.engine.stepper.runner.weights.layers[0]
    qkv, out = layer.qkv.array, layer.out.array
    assert qkv.shape[:2] == (4, 3 + 2), "three queries with each copy of a KV head"
    assert not qkv[1::2, 2].any()
    assert not out[:, 1::2, 2].any()
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=[tiny.prompt()], sampling_params=params, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == expected
