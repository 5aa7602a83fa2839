"""Tiny GGUF files, written from Hugging Face models the way llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Q

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

WRITERS = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string", list: "add_array"}
ARCHES = {
    "mixtral": "llama",
    "mistral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "minimax_m2": "minimax-m2",
    "llama4_text": "llama4",
    "ministral3": "mistral3",
}
K_QUANTS = (Q.Q4_K, Q.Q5_K, Q.Q6_K)


def write(path: Path, arch: str, keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, Q]]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        getattr(writer, WRITERS[type(value)])(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, encode(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def encode(data: np.ndarray, kind: Q) -> np.ndarray:
    """The package cannot quantize to the K formats: for these, random blocks with sane scales."""
    if kind not in K_QUANTS:
        return gguf.quants.quantize(np.ascontiguousarray(data, np.float32), kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(data.size).integers(0, 256, (data.size // block, size), np.uint8)
    scales = np.full((len(blocks), 2), 0.01, np.float16).view(np.uint8)
    if kind == Q.Q6_K:
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(*data.shape[:-1], -1)


def random_model(architecture: str, **changes: Any) -> Any:
    values = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    torch.manual_seed(0)
    kind = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}TextConfig" if kind in ("Gemma3", "Llama4") else f"{kind}Config")(
        **values
    )
    model = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.1)
    return model


def convert(
    model: Any,
    path: Path,
    *,
    kind: Q = Q.F32,
    experts: Q | None = None,
    keys: dict[str, Any] | None = None,
    extra: Any = (),
) -> Path:
    """What llama.cpp makes of `model`; vectors stay F32, and biases. `keys` come on top, or take away with
    None."""
    arch = ARCHES.get(model.config.model_type, model.config.model_type)
    all_keys = {**standard_keys(arch, model.config), **(keys or {})}
    tensors = {}
    for name, data in tensors_of(arch, model).items():
        own = experts if experts is not None and data.ndim == 3 else kind
        tensors[name] = (data, Q.F32 if data.ndim == 1 or name.endswith("bias") else own)
    tensors |= {name: (np.asarray(data, np.float32), Q.F32) for name, data in dict(extra).items()}
    return write(path, arch, {key: value for key, value in all_keys.items() if value is not None}, tensors)


def standard_keys(arch: str, config: Any) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = [f"t{i}" for i in range(config.vocab_size)]
    ropes = config.rope_parameters
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": None if arch in ("llama", "phi3", "qwen2") else head_dim,
        "attention.sliding_window": config.sliding_window if arch == "gemma3" else None,
        "rope.dimension_count": int(head_dim * ropes.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(ropes.get("full_attention", ropes)["rope_theta"]),
        "embedding_scale": getattr(config, "embedding_multiplier", None),
        "attention.scale": getattr(config, "attention_multiplier", None),
        "residual_scale": getattr(config, "residual_multiplier", None),
        "logit_scale": getattr(config, "logits_scaling", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_count": getattr(config, "num_local_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        **OWN_KEYS.get(arch, lambda config: {})(config),
    }
    return {f"{arch}.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
    }


def yarn_keys(ropes: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": ropes["factor"],
        "rope.scaling.original_context_length": ropes["original_max_position_embeddings"],
    }


OWN_KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "gpt-oss": lambda c: {
        **yarn_keys(c.rope_parameters),
        "attention.sliding_window": c.sliding_window,
        "expert_feed_forward_length": c.intermediate_size,
    },
    "glm4moe": lambda c: {
        "block_count": c.num_hidden_layers + 1,
        "nextn_predict_layers": 1,
        "expert_count": c.n_routed_experts,
        "expert_shared_count": c.n_shared_experts,
        "expert_gating_func": 2,
        "expert_weights_scale": c.routed_scaling_factor,
        "expert_weights_norm": c.norm_topk_prob,
        "leading_dense_block_count": c.first_k_dense_replace,
    },
    "minimax-m2": lambda c: {
        "expert_feed_forward_length": c.intermediate_size,
        "expert_gating_func": 2,
    },
    "llama4": lambda c: {
        "feed_forward_length": c.intermediate_size_mlp,
        "expert_feed_forward_length": c.intermediate_size,
        "interleave_moe_layer_step": c.interleave_moe_layer_step,
    },
    "mistral3": lambda c: {
        **yarn_keys(c.rope_parameters),
        "rope.scaling.yarn_log_multiplier": c.rope_parameters["mscale_all_dim"],
        "attention.temperature_scale": c.rope_parameters["llama_4_scaling_beta"],
    },
}


def experts_of(arch: str, name: str, data: np.ndarray) -> dict[str, np.ndarray]:
    """By GGUF's names; transformers 5 keeps gates and ups together, and in some families inputs first."""
    kind = "bias" if name.endswith("_bias") else "weight"
    if kind == "weight" and arch in ("gpt-oss", "llama4"):
        data = data.swapaxes(1, 2)
    if "gate_up" not in name:
        return {f"ffn_down_exps.{kind}": data}
    halves = (data[:, ::2], data[:, 1::2]) if arch == "gpt-oss" else np.split(data, 2, axis=1)
    return {f"ffn_{part}_exps.{kind}": half for part, half in zip(("gate", "up"), halves, strict=True)}


def tensors_of(arch: str, model: Any) -> dict[str, np.ndarray]:
    config = model.config
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), config.num_hidden_layers
    )
    found = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data, (stem, _, suffix) = weight.numpy(), name.rpartition(".")
        layer = name.split(".")[2] if ".layers." in name else ""
        if ".experts." in name:
            found |= {f"blk.{layer}.{part}": one for part, one in experts_of(arch, name, data).items()}
            continue
        if name.endswith(("sinks", "e_score_correction_bias")):
            own = "attn_sinks.weight" if name.endswith("sinks") else "exp_probs_b.bias"
            found[f"blk.{layer}.{own}"] = data
            continue
        if arch in ("llama", "granite", "smollm3", "mistral3") and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if arch.startswith("gemma") and stem.endswith("norm"):
            data = data + 1
        moe = stem.replace(".mlp.gate", ".block_sparse_moe.gate") if stem.endswith("mlp.gate") else stem
        found[f"{names.get_name(stem) or names.get_name(moe)}.{suffix}"] = data
    return found
