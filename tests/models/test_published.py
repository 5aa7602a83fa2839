"""Published models: their configs, cut to what counts, give exactly their published numbers of parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hex_llm.models.families import model_spec
from hex_llm.models.params import abstract_weights, declared

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
LLAMA3_ROPE = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
TIED = {"tie_word_embeddings": True}
PHI3_128K = {
    "original_max_position_embeddings": 4096,
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "longrope", "short_factor": [1.1] * 48, "long_factor": [2.2] * 48},
    "sliding_window": 262144,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "sliding_window": None}
QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
PHI4_MINI = {**TIED, "partial_rotary_factor": 0.75, "sliding_window": 262144}
GPT_OSS = {
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
GEMMA4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
}
GEMMA4_31B = {**GEMMA4, "num_global_key_value_heads": 4}
GEMMA4_26B = {
    **GEMMA4,
    "num_global_key_value_heads": 2,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
PUBLISHED: list[tuple[str, str, tuple[int, ...], dict[str, Any], int]] = [
    ("Llama-2-7b", "Llama", (4096, 11008, 32, 32, 32, 32000), {}, 6_738_415_616),
    ("Llama-2-70b", "Llama", (8192, 28672, 80, 64, 8, 32000), {}, 68_976_648_192),
    ("Llama-3.1-8B", "Llama", (4096, 14336, 32, 32, 8, 128256), LLAMA3_ROPE, 8_030_261_248),
    ("Llama-3.3-70B", "Llama", (8192, 28672, 80, 64, 8, 128256), LLAMA3_ROPE, 70_553_706_496),
    ("Llama-3.2-1B", "Llama", (2048, 8192, 16, 32, 8, 128256), {**LLAMA3_ROPE, **TIED}, 1_235_814_400),
    ("Llama-3.2-3B", "Llama", (3072, 8192, 28, 24, 8, 128256), {**LLAMA3_ROPE, **TIED}, 3_212_749_824),
    ("SmolLM2-135M", "Llama", (576, 1536, 30, 9, 3, 49152), TIED, 134_515_008),
    ("gemma-2b", "Gemma", (2048, 16384, 18, 8, 1, 256000), {"head_dim": 256}, 2_506_172_416),
    ("gemma-7b", "Gemma", (3072, 24576, 28, 16, 16, 256000), {"head_dim": 256}, 8_537_680_896),
    ("gemma-2-2b", "Gemma2", (2304, 9216, 26, 8, 4, 256000), {"head_dim": 256}, 2_614_341_888),
    ("gemma-2-9b", "Gemma2", (3584, 14336, 42, 16, 8, 256000), {"head_dim": 256}, 9_241_705_984),
    ("gemma-2-27b", "Gemma2", (4608, 36864, 46, 32, 16, 256000), {"head_dim": 128}, 27_227_128_320),
    ("Mistral-7B-v0.1", "Mistral", (4096, 14336, 32, 32, 8, 32000), {"sliding_window": 4096}, 7_241_732_096),
    ("Mistral-7B-v0.3", "Mistral", (4096, 14336, 32, 32, 8, 32768), {"sliding_window": None}, 7_248_023_552),
    ("Mixtral-8x7B", "Mixtral", (4096, 14336, 32, 32, 8, 32000), EXPERTS, 46_702_792_704),
    ("Mixtral-8x22B", "Mixtral", (6144, 16384, 56, 48, 8, 32000), EXPERTS, 140_620_634_112),
    ("Phi-3-mini-128k", "Phi3", (3072, 8192, 32, 32, 32, 32064), PHI3_128K, 3_821_079_552),
    ("Phi-3-medium-4k", "Phi3", (5120, 17920, 40, 40, 10, 32064), {"sliding_window": 2047}, 13_960_238_080),
    ("phi-4", "Phi3", (5120, 17920, 40, 40, 10, 100352), {"rope_theta": 250000}, 14_659_507_200),
    ("Qwen2-0.5B", "Qwen2", (896, 4864, 24, 14, 2, 151936), TIED, 494_032_768),
    ("Qwen2-1.5B", "Qwen2", (1536, 8960, 28, 12, 2, 151936), TIED, 1_543_714_304),
    ("Qwen2.5-7B", "Qwen2", (3584, 18944, 28, 28, 4, 152064), {}, 7_615_616_512),
    ("Qwen2.5-14B", "Qwen2", (5120, 13824, 48, 40, 8, 152064), {}, 14_770_033_664),
    ("Qwen2.5-32B", "Qwen2", (5120, 27648, 64, 40, 8, 152064), {}, 32_763_876_352),
    ("Qwen3-0.6B", "Qwen3", (1024, 3072, 28, 16, 8, 151936), {**TIED, "head_dim": 128}, 596_049_920),
    ("Qwen3-8B", "Qwen3", (4096, 12288, 36, 32, 8, 151936), {"head_dim": 128}, 8_190_735_360),
    ("Qwen3-30B-A3B", "Qwen3Moe", (2048, 6144, 48, 32, 4, 151936), QWEN3_MOE, 30_532_122_624),
    ("gemma-3-1b", "Gemma3", (1152, 6912, 26, 4, 1, 262144), {"head_dim": 256}, 999_885_952),
    ("gemma-4-31B", "Gemma4", (5376, 21504, 60, 32, 16, 262144), GEMMA4_31B, 30_697_345_340),
    ("gemma-4-26B-A4B", "Gemma4", (2816, 2112, 30, 16, 8, 262144), GEMMA4_26B, 25_233_141_790),
    ("Phi-4-mini", "Phi3", (3072, 8192, 32, 24, 8, 200064), PHI4_MINI, 3_836_021_760),
    ("SmolLM3-3B", "SmolLM3", (2048, 11008, 36, 16, 4, 128256), TIED, 3_075_098_624),
    ("Mistral-Small-24B", "Mistral", (5120, 32768, 40, 32, 8, 131072), {"head_dim": 128}, 23_572_403_200),
    ("granite-3.1-8b", "Granite", (4096, 12800, 40, 32, 8, 49155), TIED, 8_170_848_256),
    ("OLMo-2-7B", "Olmo2", (4096, 11008, 32, 32, 32, 100352), {}, 7_298_617_344),
    ("gpt-oss-20b", "GptOss", (2880, 2880, 24, 64, 8, 201088), GPT_OSS, 20_914_757_184),
    (
        "gpt-oss-120b",
        "GptOss",
        (2880, 2880, 36, 64, 8, 201088),
        {**GPT_OSS, "num_local_experts": 128},
        116_829_156_672,
    ),
]


def num_parameters(config: dict[str, Any], devices: int = 1) -> int:
    params = declared(abstract_weights(model_spec(config).split_over(devices)))
    return sum(math.prod(param.shape) for param in params)


@pytest.mark.parametrize(
    ("name", "family", "sizes", "more", "count"), PUBLISHED, ids=[p[0] for p in PUBLISHED]
)
def test_number_of_parameters(
    name: str, family: str, sizes: tuple[int, ...], more: dict[str, Any], count: int
) -> None:
    config = {"architectures": [f"{family}ForCausalLM"], **dict(zip(FIELDS, sizes, strict=True)), **more}
    assert num_parameters({"max_position_embeddings": 8192, **config}) == count


def test_llama_4_scout() -> None:
    """As published: no layer lists, so every fourth layer is without rope and all are sparse."""
    text = dict(zip(FIELDS, (5120, 8192, 48, 40, 8, 202048), strict=True))
    text |= {
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": [],
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "max_position_embeddings": 10485760,
        **LLAMA3_ROPE,
    }
    config = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    spec = model_spec(config)
    assert [layer.rope is None for layer in spec.layers[:8]] == [False, False, False, True] * 2
    assert all(layer.experts for layer in spec.layers)
    assert spec.layers[0].mask.attention_chunk == 8192
    assert spec.layers[3].mask.attention_chunk is None
    assert 107e9 < num_parameters(config) < 109e9
    assert num_parameters(config, devices=8) == num_parameters(config)
