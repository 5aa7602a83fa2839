"""Tiny random Hugging Face models of every family, for judging ours against."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from hex_llm.checks.reference import greedy as greedy
from hex_llm.checks.reference import greedy_tokens as greedy_tokens
from hex_llm.checks.reference import load_reference
from hex_llm.config import EngineConfig
from hex_llm.weights.source import fetch

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def default_model() -> tuple[Path, Any]:
    """The GGUF file of the embedded default, and transformers' model of it."""
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    return path, load_reference(path)


BASE = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA4_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "image_size": 28,
}
VISION = {  # of the others; their text is all that is looked at
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Tiny:
    """A family's architecture with a config of its own; `prompt_len` is long enough to pass a window."""

    name: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    prompt_len: int = 24
    devices: int = 4  # over how many the model can be split

    def config(self) -> transformers.PretrainedConfig:
        values = {**BASE, **self.changes}
        if self.architecture == "Llama4ForConditionalGeneration":
            text = transformers.Llama4TextConfig(**values).to_dict()
            return transformers.Llama4Config(text_config=text, vision_config=LLAMA4_VISION)
        kind, is_text = self.architecture.removesuffix("ForCausalLM"), True
        if kind.endswith("ForConditionalGeneration"):
            kind, is_text = kind.removesuffix("ForConditionalGeneration"), False
        if kind == "Gemma4" and not is_text:
            text = transformers.Gemma4TextConfig(**values).to_dict()
            return transformers.Gemma4Config(
                text_config=text, vision_config={**VISION, "num_key_value_heads": 2}, audio_config=None
            )
        if not is_text:
            vision = {**VISION, "model_type": "pixtral" if kind == "Mistral3" else "siglip_vision_model"}
            text = {"model_type": "gemma3_text", **values}
            return getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision)
        name = f"{kind}TextConfig" if kind in ("Llama4", "Gemma3", "Gemma4") else f"{kind}Config"
        return getattr(transformers, name)(**values)

    def build(self, seed: int = 0) -> Any:
        """Weights large enough that greedy search does not repeat one token for ever."""
        torch.manual_seed(seed)
        config = self.config()
        config._attn_implementation = "eager"
        model = getattr(transformers, self.architecture)(config).float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name or name.endswith("_scale"):
                    weight.add_(torch.randn_like(weight) * 0.2)
                else:  # a loud tied embedding would only ever repeat its input
                    quiet = "embed_tokens" in name and config.get_text_config().tie_word_embeddings
                    weight.copy_(torch.randn_like(weight) * (0.02 if quiet else 0.25))
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn_like(buffer) * 0.25)
                elif name.endswith("layer_scalar"):
                    buffer.copy_(torch.rand_like(buffer) * 0.4 + 0.8)
        return model

    def save(self, folder: Path, seed: int = 0, **options: Any) -> Any:
        model = self.build(seed)
        model.save_pretrained(folder, **options)
        return model

    def prompt(self, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, BASE["vocab_size"], (self.prompt_len,), generator=generator).tolist()


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
SCOUT_ROPE = rope(
    "llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=32
)
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 48,
}
PHI3_LONG = {**rope("longrope", **LONGROPE), "original_max_position_embeddings": 48}
MQA, MHA = {"num_key_value_heads": 1}, {"num_key_value_heads": 4}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "attention_chunk_size": 16,
    "floor_scale": 8,
}
QWEN3_WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "num_hidden_layers": 3,
}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
GEMMA3 = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 4}
PHI4_MINI = {
    **rope(
        "longrope",
        partial_rotary_factor=0.75,
        short_factor=[1.0, 1.1, 1.2],
        long_factor=[1.5, 2.0, 3.0],
        original_max_position_embeddings=48,
    ),
    "original_max_position_embeddings": 48,
}
MINISTRAL3 = {
    **rope(
        "yarn",
        factor=16.0,
        original_max_position_embeddings=16,
        mscale=1.0,
        mscale_all_dim=1.0,
        llama_4_scaling_beta=0.5,
    ),
    "head_dim": 16,
}
GRANITE = {
    "embedding_multiplier": 1.7,
    "logits_scaling": 1.3,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
}
GPT_OSS = {
    **rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=32),
    **MOE,
    "head_dim": 16,
    "sliding_window": 8,
}
GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.5,
    "head_dim": 16,
}
GEMMA4 = {
    "hidden_size_per_layer_input": 0,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 3.0,
}
GEMMA4_MOE = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
GEMMA4_ODD = {
    "global_head_dim": 24,
    "attention_k_eq_v": False,
    "attention_bias": True,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": None,
    "layer_types": None,
    "num_hidden_layers": 7,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.6, "rope_theta": 1e5},
    },
}

FAMILIES = [
    Tiny("llama2", "LlamaForCausalLM", MHA),
    Tiny("llama2-gqa-odd-vocab", "LlamaForCausalLM", {"vocab_size": 131, **MQA}),
    Tiny("llama3", "LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    Tiny("llama3.1", "LlamaForCausalLM", LLAMA3, prompt_len=50),
    Tiny("llama3.2-tied", "LlamaForCausalLM", {**LLAMA3, "tie_word_embeddings": True, "head_dim": 16}),
    Tiny("llama-guard-3", "LlamaForCausalLM", {**LLAMA3, **MQA, "num_hidden_layers": 3}),
    Tiny("codellama", "LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    Tiny("llama-linear", "LlamaForCausalLM", rope("linear", factor=4.0)),
    Tiny("llama-dynamic-short", "LlamaForCausalLM", rope("dynamic", factor=2.0)),
    Tiny(
        "llama-dynamic-long",
        "LlamaForCausalLM",
        {**rope("dynamic", factor=2.0), "max_position_embeddings": 40},
        prompt_len=60,
    ),
    Tiny(
        "llama-dynamic-growing",
        "LlamaForCausalLM",
        {**rope("dynamic", factor=4.0), "max_position_embeddings": 40},
        prompt_len=20,
    ),
    Tiny("llama-biases", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Tiny(
        "smollm2",
        "LlamaForCausalLM",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36, "tie_word_embeddings": True},
        devices=3,
    ),
    Tiny("gemma-2b", "GemmaForCausalLM", {**MQA, "head_dim": 16, "hidden_act": "gelu"}),
    Tiny("gemma-7b", "GemmaForCausalLM", {**MHA, "head_dim": 12}),
    Tiny("codegemma", "GemmaForCausalLM", {"head_dim": 8, "num_hidden_layers": 3}),
    Tiny(
        "gemma2-2b", "Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    ),
    Tiny(
        "gemma2-9b",
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 4, "attn_logit_softcapping": 5.0},
    ),
    Tiny(
        "gemma2-27b",
        "Gemma2ForCausalLM",
        {
            **MQA,
            "head_dim": 8,
            "query_pre_attn_scalar": 12,
            "final_logit_softcapping": 3.0,
            "sliding_window": 9,
        },
    ),
    Tiny("mistral-v0.1", "MistralForCausalLM", {"sliding_window": 8}, prompt_len=40),
    Tiny("mistral-v0.2", "MistralForCausalLM", {"sliding_window": None}),
    Tiny("mistral-v0.3-head-dim", "MistralForCausalLM", {"sliding_window": None, "head_dim": 16, **MQA}),
    Tiny("mixtral-8x7b", "MixtralForCausalLM", MOE),
    Tiny("mixtral-8x22b", "MixtralForCausalLM", {**MOE, **MQA, "num_local_experts": 8, "sliding_window": 12}),
    Tiny("phi3-mini-4k", "Phi3ForCausalLM", {**MHA, "sliding_window": 10}),
    Tiny("phi3-mini-128k-short", "Phi3ForCausalLM", {**MHA, **PHI3_LONG}, prompt_len=8),
    Tiny("phi3-mini-128k-long", "Phi3ForCausalLM", {**MHA, **PHI3_LONG}, prompt_len=60),
    Tiny("phi3-mini-128k-growing", "Phi3ForCausalLM", {**MHA, **PHI3_LONG}, prompt_len=30),
    Tiny("phi3-medium-4k", "Phi3ForCausalLM", {"sliding_window": 300}),
    Tiny("phi3-medium-128k", "Phi3ForCausalLM", {**PHI3_LONG, **MQA}, prompt_len=45),
    Tiny("phi4", "Phi3ForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 250_000.0}}),
    Tiny("phi4-reasoning", "Phi3ForCausalLM", {**MQA, "rope_theta": 5e5, "num_hidden_layers": 3}),
    Tiny("phi3-partial-rotary", "Phi3ForCausalLM", rope("default", partial_rotary_factor=0.5)),
    Tiny("qwen2-tied", "Qwen2ForCausalLM", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    Tiny("qwen2-untied", "Qwen2ForCausalLM", {**MQA, "head_dim": 16}),
    Tiny(
        "qwen2-window",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    Tiny("qwen2.5-window-off", "Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 8}),
    Tiny(
        "qwen2.5-yarn",
        "Qwen2ForCausalLM",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
        prompt_len=50,
    ),
    Tiny("llama4-scout", "Llama4ForCausalLM", {**LLAMA4, **SCOUT_ROPE}, prompt_len=40),
    Tiny("llama4-scout-vision", "Llama4ForConditionalGeneration", LLAMA4),
    Tiny(
        "llama4-dense-between",
        "Llama4ForCausalLM",
        {**LLAMA4, **MQA, "interleave_moe_layer_step": 2, "use_qk_norm": False, **LLAMA3},
    ),
    Tiny(
        "llama4-maverick",
        "Llama4ForCausalLM",
        {**LLAMA4, "num_local_experts": 32, "interleave_moe_layer_step": 2},
        prompt_len=40,
    ),
    Tiny("qwen3", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    Tiny(
        "qwen3-biases-window",
        "Qwen3ForCausalLM",
        {**MQA, "head_dim": 12, "attention_bias": True, **QWEN3_WINDOW, "num_hidden_layers": 4},
    ),
    Tiny("qwen3-moe", "Qwen3MoeForCausalLM", {**QWEN3_MOE, "norm_topk_prob": True}),
    Tiny(
        "qwen3-moe-dense-between",
        "Qwen3MoeForCausalLM",
        {**QWEN3_MOE, **MQA, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    Tiny("gemma3-1b", "Gemma3ForCausalLM", {**GEMMA3, **MQA, "num_hidden_layers": 7}),
    Tiny(
        "gemma3-27b-vision",
        "Gemma3ForConditionalGeneration",
        {
            **GEMMA3,
            "query_pre_attn_scalar": 11,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Tiny("gemma4-31b", "Gemma4ForCausalLM", GEMMA4),
    Tiny("gemma4-odd", "Gemma4ForCausalLM", {**GEMMA4, **GEMMA4_ODD, "num_attention_heads": 6}, devices=2),
    Tiny(
        "gemma4-26b-a4b-vision",
        "Gemma4ForConditionalGeneration",
        {**GEMMA4, **GEMMA4_MOE, "num_hidden_layers": 2, "layer_types": GEMMA4["layer_types"][:2]},
    ),
    Tiny(
        "gemma4-moe-odd",
        "Gemma4ForCausalLM",
        {**GEMMA4, **GEMMA4_MOE, **MHA, "num_global_key_value_heads": 2, "num_experts": 5},
    ),
    Tiny("phi4-mini", "Phi3ForCausalLM", {**PHI4_MINI, "tie_word_embeddings": True}, prompt_len=30),
    Tiny("phi4-mini-long", "Phi3ForCausalLM", {**PHI4_MINI, **MQA, "sliding_window": 300}, prompt_len=60),
    Tiny("smollm3", "SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
    Tiny(
        "smollm3-window",
        "SmolLM3ForCausalLM",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "tie_word_embeddings": False,
        },
    ),
    Tiny(
        "mistral-small-3.1",
        "Mistral3ForConditionalGeneration",
        {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
    ),
    Tiny("ministral3", "Ministral3ForCausalLM", MINISTRAL3, prompt_len=50),
    Tiny(
        "ministral3-vision",
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", **MINISTRAL3, **MQA},
    ),
    Tiny("granite3", "GraniteForCausalLM", {**GRANITE, "tie_word_embeddings": True}),
    Tiny(
        "granite3-biases", "GraniteForCausalLM", {**GRANITE, **MHA, "attention_bias": True, "mlp_bias": True}
    ),
    Tiny("olmo2", "Olmo2ForCausalLM", MHA),
    Tiny(
        "olmo2-gqa-biases",
        "Olmo2ForCausalLM",
        {"attention_bias": True, "num_attention_heads": 6, "head_dim": 8, "intermediate_size": 80},
    ),
    Tiny("olmo3", "Olmo3ForCausalLM", {**MHA, "sliding_window": 8, "num_hidden_layers": 4}),
    Tiny(
        "olmo3-yarn",
        "Olmo3ForCausalLM",
        {
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        prompt_len=50,
    ),
    Tiny("gpt-oss-20b", "GptOssForCausalLM", GPT_OSS, prompt_len=50),
    Tiny(
        "gpt-oss-odd",
        "GptOssForCausalLM",
        {
            **GPT_OSS,
            "num_attention_heads": 6,
            "swiglu_limit": 0.5,
            "attention_bias": False,
            "num_local_experts": 5,
        },
    ),
    Tiny("glm4.5", "Glm4MoeForCausalLM", {**GLM, "use_qk_norm": True, "attention_bias": True}),
    Tiny(
        "glm4.5-odd",
        "Glm4MoeForCausalLM",
        {**GLM, **MQA, "first_k_dense_replace": 2, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    Tiny("minimax-m2", "MiniMaxM2ForCausalLM", {**MOE, "head_dim": 16, "rotary_dim": 8}),
    Tiny("minimax-m2-odd", "MiniMaxM2ForCausalLM", {**MOE, **MHA, "num_local_experts": 7, "head_dim": 12}),
]
