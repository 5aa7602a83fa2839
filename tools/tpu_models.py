"""Models and the TPU slices that tools/tpu_compile.py tries them on: public shapes as data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from hex_llm.models.families import model_spec
from hex_llm.models.spec import ModelSpec
from hex_llm.weights.grouped import Form
from tools.gpu_common import LLAMA_8B


class Chip(NamedTuple):
    kind: str  # as JAX calls it
    hbm: float  # bytes
    bandwidth: float  # bytes per second
    flops: float  # bfloat16, per second
    clock: float  # cycles per second, which follow from it: 4 units that multiply 128 × 128 or 256 × 256


CHIPS = {
    "v5e": Chip("TPU v5 lite", 17.2e9, 0.82e12, 197e12, 1.5e9),
    "v6e": Chip("TPU v6 lite", 34.4e9, 1.64e12, 920e12, 1.75e9),
}


def _config(architecture: str, layers: int, width: int, ffn: int, heads: int, vocab: int, **more: Any) -> Any:
    """What a config.json says; all of these have 8 KV heads."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": ffn, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 8}
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        **sizes,
        **heads_of,
        "rms_norm_eps": 1e-5,
        **more,
    }


def _llama_rope(factor: float, high: float, max_len: int) -> dict[str, Any]:
    factors = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high}
    scaling = {"rope_type": "llama3", **factors, "original_max_position_embeddings": 8192}
    return {"rope_theta": 500000.0, "rope_scaling": scaling, "max_position_embeddings": max_len}


LLAMA_ROPE = _llama_rope(8.0, 4.0, 131072)
LLAMA_70B = _config("Llama", 80, 8192, 28672, 64, 128256, **LLAMA_ROPE)
GEMMA_2_9B = _config("Gemma2", 42, 3584, 14336, 16, 256000, head_dim=256, max_position_embeddings=8192)
MIXTRAL_8X7B = _config("Mixtral", 32, 4096, 14336, 32, 32000, rope_theta=1e6, max_position_embeddings=32768)
LLAMA_4_SCOUT = _config(
    "Llama4",
    48,
    5120,
    8192,
    40,
    202048,
    head_dim=128,
    intermediate_size_mlp=16384,
    **_llama_rope(16.0, 1.0, 10485760),
)
QWEN3 = {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 40960}
QWEN3_06B = _config("Qwen3", 28, 1024, 3072, 16, 151936, tie_word_embeddings=True, **QWEN3)
QWEN3_30B = _config("Qwen3Moe", 48, 2048, 6144, 32, 151936, num_key_value_heads=4, num_experts=128, **QWEN3)
GEMMA_3_27B = _config(
    "Gemma3", 62, 5376, 21504, 32, 262208, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168
)
GEMMA_4 = {
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "max_position_embeddings": 262144,
}
GEMMA_4_31B = _config(
    "Gemma4", 60, 5376, 21504, 32, 262144, num_key_value_heads=16, num_global_key_value_heads=4, **GEMMA_4
)
GEMMA_4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
GEMMA_4_26B = _config(
    "Gemma4", 30, 2816, 2112, 16, 262144, num_global_key_value_heads=2, **GEMMA_4, **GEMMA_4_EXPERTS
)
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = {"head_dim": 64, "max_position_embeddings": 131072, "rope_scaling": GPT_OSS_YARN}
GPT_OSS_20B = _config("GptOss", 24, 2880, 2880, 64, 201088, num_local_experts=32, **GPT_OSS)
GPT_OSS_120B = _config("GptOss", 36, 2880, 2880, 64, 201088, num_local_experts=128, **GPT_OSS)


AWQ = Form(4, group=128, has_offsets=True)


class Model(NamedTuple):
    """A model on a slice; all its chips hold a part of it, or all those of each group."""

    config: dict[str, Any]
    slice: str
    rounded_to: Form | None = None  # None: bfloat16
    context: int | None = None  # of a decoded sequence, where there is no room for what is asked for
    disagg_topo: tuple[int, int] | None = None  # groups that prefill and that decode

    @property
    def chip(self) -> Chip:
        return CHIPS[self.slice.partition(":")[0]]

    @property
    def sides(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.slice.partition(":")[2].split("x"))

    @property
    def num_chips(self) -> int:
        """That hold the model together."""
        return math.prod(self.sides) // sum(self.disagg_topo or (1,))

    def programs(self, kind: str) -> list[str]:
        """One for each group that runs it; blocks are taken where prompts are prefilled."""
        if self.disagg_topo is None:
            return [] if kind in ("take", "put") else [kind]
        prefilling, decoding = self.disagg_topo
        is_first = kind in ("prefill", "take")
        groups = range(prefilling) if is_first else range(prefilling, prefilling + decoding)
        return [f"{kind}@{group}" for group in groups]

    def spec(self, max_len: int, num_layers: int | None) -> ModelSpec:
        """With the last layers alone, if so many are asked for: the last has no window in any family."""
        spec = model_spec(self.config, max_model_len=max_len)
        return replace(spec, layers=spec.layers[-(num_layers or 0) :]).split_over(self.num_chips)


MODELS = {
    "llama-3.1-8b": Model(LLAMA_8B, "v5e:2x2"),
    "llama-3.1-70b": Model(LLAMA_70B, "v5e:4x4"),
    "gemma-2-9b": Model(GEMMA_2_9B, "v5e:2x2"),
    "mixtral-8x7b": Model(MIXTRAL_8X7B, "v5e:2x4"),
    "llama-4-scout": Model(LLAMA_4_SCOUT, "v5e:4x4"),  # 40 heads over 16 chips: groups of 5 become 2 × 3
    "llama-3.1-70b-awq": Model(LLAMA_70B, "v5e:2x2", AWQ, context=768),
    "llama-3.3-70b": Model(LLAMA_70B, "v6e:2x4"),
    "qwen3-0.6b": Model(QWEN3_06B, "v5e:2x2"),
    "qwen3-30b-a3b": Model(QWEN3_30B, "v5e:2x4"),
    "gemma-3-27b": Model(GEMMA_3_27B, "v5e:2x4"),
    "gemma-4-31b": Model(GEMMA_4_31B, "v6e:2x4"),
    "gemma-4-26b-a4b": Model(GEMMA_4_26B, "v6e:2x2"),
    "gpt-oss-20b": Model(GPT_OSS_20B, "v5e:2x2"),
    "gpt-oss-120b": Model(GPT_OSS_120B, "v6e:2x4"),  # as bfloat16
    "llama-3.1-8b-disagg": Model(LLAMA_8B, "v5e:2x4", disagg_topo=(3, 1)),
    "llama-3.1-70b-awq-disagg": Model(LLAMA_70B, "v5e:4x4", AWQ, context=768, disagg_topo=(3, 1)),
}
