"""A GGUF file as a Hugging Face checkpoint: what its `config.json` would say, and tensors by their HF names.

What conversion did to the weights (rotary rows interleaved, 1 added to Gemma's norms, experts stacked) is
undone here; `experts_apart` says in the config that experts come one by one, gates apart from ups. Not known
here: the bytes (`gguf_reader.py`) and the tokenizer (`gguf_tokenizer.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hex_llm.errors import ModelError
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.weights.checkpoint import Checkpoint
from hex_llm.weights.gguf_reader import GGUFTensor, Metadata, read_gguf
from hex_llm.weights.gguf_tokenizer import build_tokenizer, end_ids

Config = dict[str, Any]
Tensors = Mapping[str, GGUFTensor]


@dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: Metadata
    config: Config
    checkpoint: Checkpoint


def open_gguf(path: Path) -> GGUFFile:
    """Read and check the header; the tensors stay in the file, open as long as one of them is referenced."""
    metadata, tensors = read_gguf(path)
    if str(metadata.get("split.count", 1)) not in ("0", "1"):
        raise ModelError(
            f"{path}: is one part of a split model; join the parts with llama.cpp's gguf-split --merge"
        )
    keys = _Keys(path, str(metadata.get("general.architecture"))[:40], metadata)
    family = _family(keys)
    config = _config(keys, family, tensors)
    return GGUFFile(path, metadata, config, dict(_renamed(family, config, tensors)))


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    return build_tokenizer(file.path, file.metadata)


class _Family(NamedTuple):
    arch: str
    model_type: str
    architecture: str
    names: Mapping[str, str]  # a key with a suffix gives the whole name
    experts: Mapping[str, str] = {}  # beside what chooses them
    interleaved: bool = False  # rotary rows of queries and keys


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2_NAMES = _NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QWEN3_NAMES = _NAMES | _HEAD_NORMS
_QWEN3_MOE_NAMES = _QWEN3_NAMES | {"ffn_gate_inp": "mlp.gate"}
_MIXTRAL_NAMES = _NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"}
_MIXTRAL_EXPERTS = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
_EXPERTS = {part: part[4:] + "_proj" for part in _MIXTRAL_EXPERTS}
_NAMES_2025 = _NAMES | {"post_attention_norm": "post_attention_layernorm"}
_GPT_OSS_NAMES = _NAMES_2025 | {"attn_sinks.weight": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
_GLM4_MOE_NAMES = (
    _NAMES_2025
    | _HEAD_NORMS
    | {"ffn_gate_inp": "mlp.gate", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
    | {f"{part}_shexp": f"mlp.shared_experts.{name}" for part, name in _EXPERTS.items()}
)
_MINIMAX_M2_NAMES = (
    _MIXTRAL_NAMES | _HEAD_NORMS | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}
)
_LLAMA4_NAMES = (
    _NAMES
    | {"ffn_gate_inp": "feed_forward.router"}
    | {part: f"feed_forward.{name}" for part, name in _EXPERTS.items()}
    | {f"{part}_shexp": f"feed_forward.shared_expert.{name}" for part, name in _EXPERTS.items()}
)
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_FAMILIES = {
    "llama": _Family("llama", "llama", "LlamaForCausalLM", _NAMES, interleaved=True),
    "qwen2": _Family("qwen2", "qwen2", "Qwen2ForCausalLM", _NAMES),
    "qwen3": _Family("qwen3", "qwen3", "Qwen3ForCausalLM", _QWEN3_NAMES),
    "qwen3moe": _Family("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _QWEN3_MOE_NAMES, _EXPERTS),
    "gemma": _Family("gemma", "gemma", "GemmaForCausalLM", _NAMES),
    "gemma2": _Family("gemma2", "gemma2", "Gemma2ForCausalLM", _GEMMA2_NAMES),
    "gemma3": _Family("gemma3", "gemma3_text", "Gemma3ForCausalLM", _GEMMA2_NAMES | _HEAD_NORMS),
    "granite": _Family("granite", "granite", "GraniteForCausalLM", _NAMES, interleaved=True),
    "olmo2": _Family("olmo2", "olmo2", "Olmo2ForCausalLM", _GEMMA2_NAMES | _HEAD_NORMS),
    "phi3": _Family("phi3", "phi3", "Phi3ForCausalLM", _NAMES | {"ffn_up": "mlp.gate_up_proj"}),
    "smollm3": _Family("smollm3", "smollm3", "SmolLM3ForCausalLM", _NAMES, interleaved=True),
    "gpt-oss": _Family("gpt-oss", "gpt_oss", "GptOssForCausalLM", _GPT_OSS_NAMES, _EXPERTS),
    "glm4moe": _Family("glm4moe", "glm4_moe", "Glm4MoeForCausalLM", _GLM4_MOE_NAMES, _EXPERTS),
    "minimax-m2": _Family(
        "minimax-m2", "minimax_m2", "MiniMaxM2ForCausalLM", _MINIMAX_M2_NAMES, _MIXTRAL_EXPERTS
    ),
    "llama4": _Family("llama4", "llama4_text", "Llama4ForCausalLM", _LLAMA4_NAMES, _EXPERTS),
    "mistral3": _Family("mistral3", "ministral3", "Ministral3ForCausalLM", _NAMES, interleaved=True),
}
_MIXTRAL = _Family("llama", "mixtral", "MixtralForCausalLM", _MIXTRAL_NAMES, _MIXTRAL_EXPERTS, True)
_MISTRAL = _FAMILIES["llama"]._replace(model_type="mistral", architecture="MistralForCausalLM")
_OLMO3 = _FAMILIES["olmo2"]._replace(model_type="olmo3", architecture="Olmo3ForCausalLM")


def _family(keys: _Keys) -> _Family:
    if keys.arch not in _FAMILIES:
        raise ModelError(
            f"{keys.path}: GGUF architecture {keys.arch!r} is not supported ({', '.join(_FAMILIES)} are)"
        )
    if keys.arch == "llama" and keys.optional("expert_count"):
        return _MIXTRAL
    if keys.arch in ("llama", "olmo2") and keys.optional("attention.sliding_window"):
        return _MISTRAL if keys.arch == "llama" else _OLMO3
    return _FAMILIES[keys.arch]


def _renamed(family: _Family, config: Config, tensors: Tensors) -> Iterator[tuple[str, GGUFTensor]]:
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?([\w.]+?)(_exps)?(?:\.(\d+))?\.(weight|bias)", name)
        layer, part, stacked, expert, kind = match.groups("") if match else ("",) * 5
        prefix = f"model.layers.{layer}." if layer else ""
        if layer and int(layer[:9]) >= config["num_hidden_layers"]:
            continue  # it predicts tokens further on
        if (stacked or expert) and layer and part in family.experts:
            moe = f"{prefix}{family.names['ffn_gate_inp'].rpartition('.')[0]}.experts"
            if kind == "bias":
                yield f"{moe}.{family.experts[part]}_bias", tensor
                continue
            # In files of 2023 the experts are apart already.
            for i, one in _unstacked(tensor, config) if stacked else ((expert, tensor),):
                yield f"{moe}.{i}.{family.experts[part]}.weight", one
        elif f"{part}.{kind}" in family.names:
            yield prefix + family.names[f"{part}.{kind}"], tensor
        elif part in family.names and not expert and not stacked and len(tensor.shape) <= 2:
            yield f"{prefix}{family.names[part]}.{kind}", _restored(family, part, config, tensor)
        elif name not in _ROPE_TENSORS:
            raise ModelError(
                f"{tensor.path}: tensor {name} {tensor.shape} is none of a {family.arch} model's; "
                "this variant of the architecture is not supported"
            )


def _unstacked(tensor: GGUFTensor, config: Config) -> Iterator[tuple[int, GGUFTensor]]:
    count, *shape = tensor.shape
    if len(shape) != 2 or count != config["num_local_experts"]:
        raise ModelError(f"{tensor.path}: tensor {tensor.name} {tensor.shape} is not one matrix per expert")
    for i in range(count):
        yield i, replace(tensor, shape=tuple(shape), offset=tensor.offset + i * shape[0] * tensor.row_bytes)


def _restored(family: _Family, part: str, config: Config, tensor: GGUFTensor) -> GGUFTensor:
    if family.arch.startswith("gemma") and part.endswith("norm"):
        return replace(tensor, added=1.0)
    if not family.interleaved or part not in ("attn_q", "attn_k"):
        return tensor
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    if tensor.shape[0] % (2 * heads):
        raise ModelError(
            f"{tensor.path}: tensor {tensor.name} {tensor.shape} does not divide into {heads} heads"
        )
    return replace(tensor, heads=heads)


class _Keys(NamedTuple):
    """The metadata under one architecture's prefix, each value checked to be of its type."""

    path: Path
    arch: str
    metadata: Metadata

    def number(self, key: str, default: float) -> float:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value)
        return float(value)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one number per layer
        if type(value) is not int or value < 1:
            raise self._wrong(key, value)
        return value

    def optional(self, key: str) -> int | None:
        """None where the key is missing or 0."""
        return self.positive(key) if self.number(key, 0) else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if type(value) is not bool:
            raise self._wrong(key, value)
        return value

    def text(self, key: str, default: str) -> str:
        return str(self.metadata.get(f"{self.arch}.{key}", default))

    def token_id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int else None

    def _wrong(self, key: str, value: object) -> ModelError:
        fault = "is missing" if value is None else f"is {str(value)[:40]!r}, which it cannot be"
        return ModelError(f"{self.path}: {self.arch}.{key} {fault}; convert the model again")


def _config(keys: _Keys, family: _Family, tensors: Tensors) -> Config:
    if "token_embd.weight" not in tensors:
        raise ModelError(
            f"{keys.path}: has no tensor token_embd.weight; take a file that holds a whole model"
        )
    hidden, heads = keys.positive("embedding_length"), keys.positive("attention.head_count")
    head_dim, ends = hidden // heads, end_ids(keys.metadata)
    if family.arch in (
        "llama",
        "mistral3",
    ):  # in the other architectures the rotary size may be less than the head's
        head_dim = keys.positive("rope.dimension_count", head_dim)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": _num_layers(keys),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.positive("attention.head_count_kv", heads),
        "head_dim": keys.positive("attention.key_length", head_dim),
        "intermediate_size": keys.positive("feed_forward_length"),
        "hidden_act": "silu",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": keys.positive("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "sliding_window": keys.optional("attention.sliding_window"),
        "bos_token_id": keys.token_id("bos"),
        "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": keys.token_id("padding"),
    }
    return config | _specific(keys, family.model_type, config, tensors)


def _num_layers(keys: _Keys) -> int:
    """Without those that predict tokens further on, which come last."""
    further = keys.optional("nextn_predict_layers") or 0
    if further >= keys.positive("block_count"):
        raise ModelError(
            f"{keys.path}: {further} layers that predict further are all; convert the model again"
        )
    return keys.positive("block_count") - further


def _rope_scaling(keys: _Keys, tensors: Tensors) -> Config | None:
    if "rope_factors_long.weight" in tensors:
        long, short = (
            _factors(tensors, f"rope_factors_{name}.weight", keys.path) for name in ("long", "short")
        )
        return {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    # What conversion makes of Llama 3.1's scaling: each frequency's divisor.
    if "rope_freqs.weight" in tensors:
        return {"rope_type": "factors", "factors": _factors(tensors, "rope_freqs.weight", keys.path)}
    kind = keys.text("rope.scaling.type", "linear")
    # The latter: files of 2023.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0 or factor <= 0.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(keys, factor)
    raise ModelError(
        f"{keys.path}: rope scaling {kind[:40]!r} without factors is not supported; linear and yarn are"
    )


def _yarn(keys: _Keys, factor: float) -> Config:
    original = keys.optional("rope.scaling.original_context_length")
    # The file's factor multiplies what HF computes by itself where it is told nothing.
    scale = keys.number("rope.scaling.attn_factor", keys.number("rope.scaling.yarn_attn_factor", 1.0))
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": scale * (0.1 * math.log(factor) + 1.0) if scale != 1.0 else None,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        "truncate": False if keys.arch == "gpt-oss" else None,  # which no key says
    }
    if log_multiplier := keys.number("rope.scaling.yarn_log_multiplier", 0.0):
        scaling |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
    return {name: value for name, value in scaling.items() if value is not None}


def _factors(tensors: Tensors, name: str, path: Path) -> list[float]:
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.shape[0] > 4096:
        raise ModelError(
            f"{path}: tensor {name} is missing or not one number per frequency; convert the model again"
        )
    factors: list[float] = tensor.read((slice(None),)).astype(np.float64).tolist()
    return factors


def _specific(keys: _Keys, model_type: str, config: Config, tensors: Tensors) -> Config:
    """What only some families' configs say, or say otherwise."""
    match model_type:
        case "llama":
            biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
            return {key: name in tensors for key, name in biases.items()}
        case "mixtral" | "qwen3_moe" | "gpt_oss":
            return _experts(keys, config)
        case "glm4_moe":
            return _experts(keys, config) | _glm4_moe(keys, config, tensors)
        case "minimax_m2":
            return _experts(keys, config) | {"rotary_dim": _rotated(keys, config)}
        case "llama4_text":
            return _llama4(keys, _experts(keys, config))
        case "gemma" | "gemma2" | "gemma3_text":
            activation = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
            return activation if model_type == "gemma" else activation | _gemma2(keys, config)
        case "granite":
            scales = "embedding_scale", "attention.scale", "residual_scale", "logit_scale"
            names = "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
            return {name: keys.number(key, 1.0) for name, key in zip(names, scales, strict=True)}
        case "ministral3":
            beta = keys.number("attention.temperature_scale", 0.0)
            original = keys.optional("rope.scaling.original_context_length")
            scaling = {"llama_4_scaling_beta": beta, "original_max_position_embeddings": original}
            return {"rope_parameters": scaling if beta else {}}
        case "phi3":
            original = keys.optional("rope.scaling.original_context_length")
            return {
                "original_max_position_embeddings": original or config["max_position_embeddings"],
                "partial_rotary_factor": _rotated(keys, config) / config["head_dim"],
            }
    return {}


def _rotated(keys: _Keys, config: Config) -> int:
    return keys.positive("rope.dimension_count", config["head_dim"])


def _experts(keys: _Keys, config: Config) -> Config:
    experts, used = keys.positive("expert_count"), keys.positive("expert_used_count")
    if not used <= experts <= 1024:
        raise ModelError(f"{keys.path}: cannot use {used} of {experts} experts; convert the model again")
    size = keys.positive("expert_feed_forward_length", config["intermediate_size"])
    # That scores are normalized goes without saying, but in some.
    normalized = keys.flag("expert_weights_norm", True)
    found = {"num_local_experts": experts, "num_experts_per_tok": used, "experts_apart": True}
    return found | {"moe_intermediate_size": size, "norm_topk_prob": normalized}


def _glm4_moe(keys: _Keys, config: Config, tensors: Tensors) -> Config:
    return {
        "partial_rotary_factor": _rotated(keys, config) / config["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "n_group": keys.positive("expert_group_count", 1),
        "n_shared_experts": keys.positive("expert_shared_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "first_k_dense_replace": keys.optional("leading_dense_block_count") or 0,
    }


def _llama4(keys: _Keys, experts: Config) -> Config:
    return experts | {
        "intermediate_size": experts["moe_intermediate_size"],
        "intermediate_size_mlp": keys.positive("feed_forward_length"),
        "interleave_moe_layer_step": keys.positive("interleave_moe_layer_step", 1),
        "use_qk_norm": experts["num_local_experts"] != 128,  # all but Maverick, which no key says
    }


def _gemma2(keys: _Keys, config: Config) -> Config:
    # The file does not say how queries are scaled: by 256 or the head, but for the 27B, known by its layers.
    is_27b = config["num_hidden_layers"] in (46, 62)
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else 256
    if keys.arch == "gemma3":
        return {"query_pre_attn_scalar": scalar if is_27b else config["head_dim"]}
    return {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "sliding_window": config["sliding_window"] or 4096,
    }
