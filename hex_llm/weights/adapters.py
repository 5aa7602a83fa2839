"""PEFT's adapters (LoRA): what adapter_config.json and adapter_model.safetensors add to each module. No jax.

An adapter adds scale * up @ down to a module's weight. What would have to be computed otherwise is refused by
its name, as is every tensor that means something else.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hex_llm.errors import ModelError, one_line
from hex_llm.weights.safetensors import Array, read_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Fields that may say anything: they tell how it was trained, or what tensors tell too. All others are unset.
INERT = re.compile(
    "task_type|peft_type|peft_version|auto_mapping|base_model_name_or_path|revision|inference_mode|r|lora_alpha|"
    "rank_pattern|alpha_pattern|use_rslora|target_modules|exclude_modules|layers_to_transform|layers_pattern|"
    "lora_dropout|fan_in_fan_out|bias|init_lora_weights|megatron_core|qalora_group_size|runtime_config|"
    "(megatron|loftq|eva|lora_ga|velora|monteclora)_config"
)
OTHER_BASES = ("pissa", "olora", "corda", "loftq")  # ways to begin a training that change the base's weights
PREFIX = "base_model.model."
PARTS = re.compile(r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_embedding_[AB])")
MAX_NUMBER = 1e9  # of ranks and alphas
MAX_PATTERN = 200  # letters of a pattern
MAX_REPEATS = 3  # in it, and no groups: more could take for ever to match


class LowRank(NamedTuple):
    """What is added to a module's weight [outputs, inputs] is up @ down."""

    down: Array  # [rank, inputs]
    up: Array  # [outputs, rank], scaled


class Adapter(NamedTuple):
    digest: str  # of the bytes that it was made from
    base: str  # the model that it was trained on, as it says
    modules: Mapping[str, LowRank]  # by their names in the base's checkpoint


def parse_adapter(config_bytes: bytes, weights: bytes, max_rank: int, dtype: np.dtype[Any]) -> Adapter:
    """ModelError says why it cannot be served."""
    config, digest = _config(config_bytes), hashlib.sha256(config_bytes + hashlib.sha256(weights).digest())
    parts: dict[str, dict[str, Array]] = {}
    for name, tensor in read_tensors(Path(WEIGHTS), weights).items():
        found = PARTS.fullmatch(name.removeprefix(PREFIX))
        if found:
            parts.setdefault(found["module"], {})[found["part"]] = tensor
        elif not name.endswith(".base_layer.weight"):  # PEFT also saves the base's own embeddings
            raise ModelError(f"the adapter has {name!r:.120}, which is no part of a LoRA")
    if not parts:
        raise ModelError("the adapter trains no module of the model")
    modules = {name: _low_rank(name, each, config, max_rank, dtype) for name, each in parts.items()}
    return Adapter(digest.hexdigest(), _shown(config.get("base_model_name_or_path")), modules)


def _config(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ModelError(f"{CONFIG} is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{CONFIG}: peft_type {_shown(config.get('peft_type'))} is not supported, only LORA")
    for name, value in config.items():
        if value and not INERT.fullmatch(name):
            raise ModelError(f"{CONFIG}: {_shown(name)} is not supported ({_shown(value)})")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{CONFIG}: bias is not supported ({_shown(config['bias'])})")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.startswith(OTHER_BASES):
        raise ModelError(f"{CONFIG}: init_lora_weights {_shown(begun)} means another base; convert it (PEFT)")
    return config


def _low_rank(
    name: str, parts: dict[str, Array], config: Mapping[str, Any], max_rank: int, dtype: np.dtype[Any]
) -> LowRank:
    match sorted(parts):
        case ["lora_A.weight", "lora_B.weight"]:
            down, up = parts["lora_A.weight"], parts["lora_B.weight"]
        case [
            "lora_embedding_A",
            "lora_embedding_B",
        ]:  # [rank, tokens], [width, rank]: a table is its own outputs
            down, up = parts["lora_embedding_B"].T, parts["lora_embedding_A"].T
        case _:
            raise ModelError(f"{_shown(name)}: the adapter has only one of its two matrices")
    if down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1] or not len(down):
        raise ModelError(f"{_shown(name)}: matrices of {down.shape} and {up.shape} do not fit together")
    rank = len(down)
    if rank > max_rank:
        raise ModelError(f"{_shown(name)}: rank {rank} is above the limit, {max_rank} (--max_lora_rank)")
    if rank != (says := _number(config, "r", "rank_pattern", name)):
        raise ModelError(f"{_shown(name)}: rank {rank}, but {CONFIG} says {says:g}")
    scale = _number(config, "lora_alpha", "alpha_pattern", name) / (
        math.sqrt(rank) if config.get("use_rslora") else rank
    )
    with np.errstate(over="ignore"):
        both = LowRank(down.astype(dtype), (up.astype(np.float32) * np.float32(scale)).astype(dtype))
    if not all(np.isfinite(part).all() for part in both):
        raise ModelError(f"{_shown(name)}: the adapter's weights are not finite numbers in {dtype}")
    return both


def _number(config: Mapping[str, Any], name: str, by_pattern: str, module: str) -> float:
    """A setting, which may differ for modules like a pattern."""
    value, patterns = config.get(name), config.get(by_pattern) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{CONFIG}: {by_pattern} must be an object")
    for pattern, special in patterns.items():
        if _is_like(module, pattern, by_pattern):
            value = special
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ModelError(f"{CONFIG}: {name} must be a number")
    return value


def _is_like(module: str, pattern: str, field: str) -> bool:
    """As PEFT matches it: the end of the name, from a dot on."""
    is_simple = len(pattern) <= MAX_PATTERN and not set(pattern) & set("([{")
    try:
        if is_simple and sum(map(pattern.count, "*+?")) <= MAX_REPEATS:
            return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error:
        pass
    raise ModelError(f"{CONFIG}: {field} has a pattern that is not supported ({_shown(pattern)})")


def _shown(value: Any) -> str:
    return one_line(str(value))[:80]
