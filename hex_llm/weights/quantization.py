"""What a config.json says of quantized weights: the method, and how each kind of matrix is quantized.

What is not supported is refused here by its name. The tensors are found by `quantized.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.errors import ModelError
from hex_llm.models.hf_config import HFConfig, shown
from hex_llm.weights.grouped import Form


@dataclass(frozen=True)
class Scheme:
    bits: int
    block: tuple[int | None, int | None]  # so many outputs and inputs share a scale; None: all
    symmetric: bool = True  # there need not be zero points
    packed: bool = False  # several numbers in a word
    zeros_less: int = 0  # stored zero points are the true ones less this
    is_float: bool = False

    @property
    def form(self) -> Form | None:
        """As weights that are quantized here come to be like it; None: none do."""
        if self.is_float:
            return Form(self.bits, self.block[1] or 0, is_float=True)
        return Form(self.bits, self.block[1] or 0, has_offsets=self.bits == 4)

    def __str__(self) -> str:
        outputs, inputs = self.block
        if (outputs, inputs) == (None, None):
            return f"{self.bits} bits with a scale for each matrix"
        if outputs == 1:
            return f"{self.bits} bits with a scale for " + (
                "each output" if inputs is None else f"{inputs} inputs"
            )
        return f"{self.bits} bits with a scale for {outputs}x{inputs}"


TENSOR, CHANNEL = (None, None), (1, None)


@dataclass(frozen=True)
class Quantization:
    method: str  # as config.json and --quantization call it
    schemes: tuple[Scheme, ...]  # a matrix has the first that fits its tensors

    def __str__(self) -> str:
        return f"{self.method} ({', or '.join(dict.fromkeys(map(str, self.schemes)))})"


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """None: the weights are not quantized. ModelError on a method, or a variant of it, that is not known."""
    key = "quantization_config" if config.get("quantization_config") else "compression_config"
    if not config.get(key):
        return None
    c = HFConfig(config).section(key)
    method = c.get("quant_method", _unnamed_method(c))
    if not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"{key}: quant_method={shown(method)} is not supported; supported are {', '.join(METHODS)}"
        )
    return Quantization(method, METHODS[method](c))


def _unnamed_method(c: HFConfig) -> str | None:
    """Early configs of these two do not say it."""
    if "load_in_8bit" in c.values or "load_in_4bit" in c.values:
        return "bitsandbytes"
    return "compressed-tensors" if "config_groups" in c.values else None


def _awq(c: HFConfig) -> tuple[Scheme, ...]:
    version = c.text("version", c.text("format", "gemm")).lower()
    _one_of("version", version, "gemm")
    bits = _one_of("bits", c.get("bits", 4), 4)
    return (Scheme(bits, (1, _group_size(c)), symmetric=not c.boolean("zero_point", True), packed=True),)


def _gptq(c: HFConfig) -> tuple[Scheme, ...]:
    bits = _one_of("bits", c.get("bits"), 4, 8)
    form = _one_of("checkpoint_format", c.get("checkpoint_format", "gptq"), "gptq", "gptq_v2")
    _one_of("pack_dtype", c.get("pack_dtype", "int32"), "int32")
    _one_of("is_marlin_format", c.get("is_marlin_format", False), False)
    less = 1 if form == "gptq" else 0
    return (Scheme(bits, (1, _group_size(c)), symmetric=False, packed=True, zeros_less=less),)


def _bitsandbytes(c: HFConfig) -> tuple[Scheme, ...]:
    """A matrix of 4 bits tells the rest itself."""
    if not c.boolean("load_in_4bit"):
        return (Scheme(8, CHANNEL),)
    _one_of("bnb_4bit_quant_type", c.get("bnb_4bit_quant_type", "fp4"), "fp4", "nf4")
    _one_of("bnb_4bit_quant_storage", c.get("bnb_4bit_quant_storage", "uint8"), "uint8")
    return (Scheme(4, (1, 64), packed=True),)


def _fp8(c: HFConfig) -> tuple[Scheme, ...]:
    _one_of("activation_scheme", c.get("activation_scheme", "dynamic"), "dynamic", "static")
    if c.get("weight_block_size") is None:
        return Scheme(8, TENSOR, is_float=True), Scheme(8, CHANNEL, is_float=True)
    return (Scheme(8, _block(c, "weight_block_size"), is_float=True),)


def _compressed_tensors(c: HFConfig) -> tuple[Scheme, ...]:
    _one_of("quantization_status", c.get("quantization_status", "compressed"), "compressed")
    for key in ("sparsity_config", "transform_config"):
        _one_of(f"{key}.format", c.section(key).get("format", "dense"), "dense")
    if c.section("transform_config").get("config_groups"):
        raise ModelError("quantization_config: transform_config is not supported")
    groups = c.section("config_groups")
    schemes = tuple(_compressed_group(c, groups.section(name)) for name in groups.values)
    if not schemes:
        raise ModelError("quantization_config: config_groups must say how weights are quantized")
    return schemes


def _compressed_group(c: HFConfig, group: HFConfig) -> Scheme:
    weights = group.section("weights")
    form = _one_of("format", group.get("format", c.get("format")), *COMPRESSED)
    packed = form == "pack-quantized"
    kind = _one_of("type", weights.get("type", "int"), *COMPRESSED[form])
    bits = _one_of("num_bits", weights.get("num_bits", 8), *((8,) if kind == "float" else (4, 8)))
    strategies = ("channel", "group") if packed else ("tensor", "channel", "group", "block")
    blocks: dict[str, Callable[[], tuple[int | None, int | None]]] = {
        "tensor": lambda: TENSOR,
        "channel": lambda: CHANNEL,
        "group": lambda: (1, _group_size(weights)),
        "block": lambda: _block(weights, "block_structure"),
    }
    strategy = _one_of("strategy", weights.get("strategy", "tensor"), *strategies)
    symmetric = weights.boolean("symmetric", True)
    return Scheme(bits, blocks[strategy](), symmetric=symmetric, packed=packed, is_float=kind == "float")


# By format: the types of numbers that it can hold.
COMPRESSED = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "naive-quantized": ("int", "float"),
    "float-quantized": ("float",),
}
METHODS: dict[str, Callable[[HFConfig], tuple[Scheme, ...]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "fbgemm_fp8": lambda c: (Scheme(8, CHANNEL, is_float=True),),
    "mxfp4": lambda c: (Scheme(4, (1, 32), packed=True, is_float=True),),
    "compressed-tensors": _compressed_tensors,
}


def _group_size(c: HFConfig) -> int | None:
    return None if c.get("group_size", 128) == -1 else c.integer("group_size", 128)


def _block(c: HFConfig, key: str) -> tuple[int, int]:
    """Two sizes, as a list or, in compressed-tensors' early configs, as "128x128"."""
    value = c.get(key)
    sizes = value.split("x") if isinstance(value, str) else value
    if isinstance(sizes, list) and len(sizes) == 2:
        numbers = [int(s) if isinstance(s, str) and re.fullmatch("[0-9]{1,9}", s) else s for s in sizes]
        outputs, inputs = (HFConfig({key: number}).integer(key) for number in numbers)
        return outputs, inputs
    raise ModelError(f"quantization_config: {key}={shown(value)} must be two whole numbers")


def _one_of(key: str, value: Any, *known: Any) -> Any:
    if not any(type(value) is type(one) and value == one for one in known):
        raise ModelError(
            f"quantization_config: {key}={shown(value)} is not supported; supported are "
            f"{', '.join(map(str, known))}"
        )
    return value
