"""From the rope fields of a config.json to resolved frequencies, in float32 as transformers does it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hex_llm.errors import ModelError
from hex_llm.models.hf_config import HFConfig, shown
from hex_llm.models.spec import Rope

Floats = npt.NDArray[Any]  # float32


def rope_from(c: HFConfig, head_dim: int, default_theta: float, *, interleaved: bool = False) -> Rope:
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            return _rope(c, head_dim, default_theta, interleaved)
    except (ArithmeticError, ValueError) as error:
        raise ModelError("config.json: the rope numbers are too large or too small to use") from error


def _rope(c: HFConfig, head_dim: int, default_theta: float, interleaved: bool) -> Rope:
    scaling = rope_settings(c)
    theta = scaling.positive("rope_theta", c.get("rope_theta", default_theta))
    kind = rope_type(scaling)
    share = scaling.positive("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    dim = head_dim if kind == "proportional" else int(head_dim * share)
    if share > 1 or dim < 2 or dim % 2:
        raise ModelError(
            f"config.json: rotary positions need an even number of dimensions, not {dim} of {head_dim}"
        )
    if kind not in SCALINGS:
        raise ModelError(f"config.json: rope type {shown(kind)} is unknown; known are {', '.join(SCALINGS)}")
    base: Floats = np.float32(1) / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    resolved = SCALINGS[kind](base, theta, scaling, c)
    return Rope(**{"inv_freq": _numbers(base), "interleaved": interleaved, **resolved})


def rope_settings(c: HFConfig) -> HFConfig:
    """The rope fields under their old name or their new one."""
    return HFConfig({**c.section("rope_scaling").values, **c.section("rope_parameters").values})


def rope_type(scaling: HFConfig) -> str:
    return scaling.text("rope_type", scaling.text("type", "default"))


def _numbers(values: Floats) -> tuple[float, ...]:
    return tuple(float(v) for v in values)


def _original_len(scaling: HFConfig, c: HFConfig) -> int:
    key = "original_max_position_embeddings"
    return scaling.integer(key, c.get(key, c.get("max_position_embeddings")))


def _plain(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    return {}


def _linear(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    return {"inv_freq": _numbers(base / np.float32(scaling.positive("factor")))}


def _dynamic(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    if len(base) < 2:
        raise ModelError("config.json: dynamic rope scaling needs at least 4 rotated dimensions")
    length = c.integer("max_position_embeddings")
    return {"ntk": (theta, scaling.positive("factor")), "original_len": length}


def _llama3(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    factor = np.float32(scaling.positive("factor"))
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    length = _original_len(scaling, c)
    if high < low:
        raise ModelError("config.json: high_freq_factor must not be less than low_freq_factor")
    rotations = length / (np.float32(2 * math.pi) / base)
    if high == low:  # Llama 4 Scout: none between
        blend = (rotations >= low).astype(np.float32)
    else:
        blend = np.clip((rotations - low) / (high - low), 0, 1).astype(np.float32)
    return {"inv_freq": _numbers((1 - blend) * base / factor + blend * base)}


def _yarn(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    dim, length = 2 * len(base), _original_len(scaling, c)
    factor = scaling.positive("factor", c.integer("max_position_embeddings") / length)

    def turning_dim(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning_dim(scaling.positive("beta_fast", 32)), turning_dim(scaling.positive("beta_slow", 1))
    if scaling.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    inv_freq = base / np.float32(factor) * ramp + base * (1 - ramp)
    return {"inv_freq": _numbers(inv_freq), "magnitude": _yarn_magnitude(factor, scaling)}


def _yarn_magnitude(factor: float, scaling: HFConfig) -> float:
    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = scaling.optional_float("mscale"), scaling.optional_float("mscale_all_dim")
    by_default = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1)
    return scaling.positive("attention_factor", by_default)


def _longrope(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    length = _original_len(scaling, c)
    factor = scaling.positive("factor", c.integer("max_position_embeddings") / length)
    grown = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    short, long = (
        np.array(scaling.floats(k, len(base)), np.float32) for k in ("short_factor", "long_factor")
    )
    return {
        "inv_freq": _numbers(base / short),
        "long_inv_freq": _numbers(base / long),
        "original_len": length,
        "magnitude": scaling.positive("attention_factor", grown),
    }


def _factors(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    """Frequencies divided by given numbers: the form in which GGUF files hold llama3 scaling."""
    return {"inv_freq": _numbers(base / np.array(scaling.floats("factors", len(base)), np.float32))}


def _proportional(base: Floats, theta: float, scaling: HFConfig, c: HFConfig) -> dict[str, Any]:
    """Pairs that are not turned lie between others of both halves: their frequency is 0."""
    num = int(scaling.positive("partial_rotary_factor", 1.0) * 2 * len(base) // 2)
    turned = np.arange(len(base)) < num
    return {"inv_freq": _numbers(base / np.float32(scaling.positive("factor", 1.0)) * turned)}


SCALINGS = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # its first name
    "factors": _factors,
    "proportional": _proportional,
}
