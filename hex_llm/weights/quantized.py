"""A quantized checkpoint as a plain one: a matrix that lies in several tensors is shown as one, by its name.

How the methods lay their tensors out is written down here: what is packed along which axis, where the zero
points are. What is not quantized passes through. Every shape is checked before anything large is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hex_llm.errors import ModelError
from hex_llm.models.hf_config import shown
from hex_llm.weights.checkpoint import Checkpoint
from hex_llm.weights.grouped import E2M1
from hex_llm.weights.packing import F32, Grid, Nested, Packed, Plain, QuantizedTensor, stored
from hex_llm.weights.quantization import Quantization, Scheme
from hex_llm.weights.safetensors import FLOATS, INTEGERS, SafeTensor

FP8 = ("F8_E4M3", "F8_E5M2")
BYTES = ("I8", "U8", *FP8)
MARKS = (".qweight", ".weight_packed", ".weight")  # the last only where it is of bytes
MAX_STATE_BYTES = 1 << 12
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # even numbers lie in the lower half of a word, odd ones above
MX_GROUP = 32


def dequantized(checkpoint: Checkpoint, quantization: Quantization) -> Checkpoint:
    """The checkpoint with a QuantizedTensor `name.weight` for each quantized module; the tensors that these
    are made of stay in sight too. ModelError: tensors are missing or do not fit each other."""
    tensors = {name: tensor for name, tensor in checkpoint.items() if isinstance(tensor, SafeTensor)}
    modules = (_Module(name.rpartition(".")[0], tensors) for name in tensors if _marks(tensors[name]))
    matrices = {module.name + ".weight": _built(module, quantization) for module in modules}
    matrices |= _experts_of_mxfp4(tensors)
    if not matrices:
        raise ModelError(f"config.json says that weights are quantized by {quantization.method}, but none is")
    for name, tensor in tensors.items():
        if tensor.dtype in FP8 and name not in matrices:
            raise ModelError(
                f"{name!r:.120} holds {tensor.dtype}, but only matrices of their own have scales"
            )
    return {**checkpoint, **matrices}


def _marks(tensor: SafeTensor) -> bool:
    """Whether it holds the numbers of a quantized matrix."""
    return tensor.name.endswith(MARKS[:2]) or (tensor.name.endswith(MARKS[2]) and tensor.dtype in BYTES)


@dataclass(frozen=True)
class _Module:
    """The tensors that one matrix is made of."""

    name: str
    tensors: Mapping[str, SafeTensor]

    def optional(self, *parts: str) -> SafeTensor | None:
        return next((t for part in parts if (t := self.tensors.get(f"{self.name}.{part}"))), None)

    def part(self, *parts: str) -> SafeTensor:
        """The first of these that there is."""
        tensor = self.optional(*parts)
        if tensor is None:
            name = f"{self.name}.{parts[0]}"
            raise ModelError(f"the checkpoint lacks {name!r:.120}: is it complete?")
        return tensor

    def matrix(self, part: str, *dtypes: str) -> SafeTensor:
        tensor = self.part(part)
        if len(tensor.shape) != 2 or tensor.dtype not in dtypes:
            raise ModelError(
                f"{tensor.name!r:.120} holds {tensor.dtype} in the shape {shown(list(tensor.shape))}, but it "
                f"must be a matrix of {' or '.join(dtypes)}"
            )
        return tensor

    def shaped(self, tensor: SafeTensor, *shape: int) -> SafeTensor:
        """It with this shape; axes of size 1 may be absent in the file."""
        if [n for n in tensor.shape if n != 1] != [n for n in shape if n != 1]:
            raise ModelError(
                f"{tensor.name!r:.120} has shape {shown(list(tensor.shape))}, but config.json and the matrix "
                f"ask for {list(shape)}"
            )
        return tensor.viewed(*shape)

    def scales(self, *parts: str) -> SafeTensor:
        tensor = self.part(*parts)
        if tensor.dtype not in FLOATS:
            raise ModelError(f"{tensor.name!r:.120} holds {tensor.dtype}, but scales must be floats")
        return tensor

    def divided(self, size: int | None, inputs: int) -> int:
        """The size of groups of inputs; None: all are one."""
        size = size or max(inputs, 1)
        if inputs % size:
            raise ModelError(f"{self.name!r:.120}: group_size={size} does not divide its {inputs} inputs")
        return size


def _built(module: _Module, quantization: Quantization) -> QuantizedTensor:
    """By the first scheme that fits; where none does, the last one's error says what is wrong."""
    error = None
    for scheme in quantization.schemes:
        try:
            return BUILDERS[quantization.method, scheme.packed](module, scheme)
        except ModelError as misfit:
            error = misfit
    assert error is not None
    raise error


class _Words(NamedTuple):
    """How a method calls the parts of a matrix whose codes share words, as its zero points do for several
    outputs; and how they lie in the file."""

    codes: str
    scales: str
    zeros: str
    groups: str  # of each input
    axis: int  # along which codes share a word: 0, outputs; 1, inputs
    transposed: bool = False  # [inputs, outputs]
    shifts: tuple[int, ...] = ()  # where in a word each number begins; (): in order


# qweight [K, N/8], qzeros [K/G, N/8], scales [K/G, N]
AWQ = _Words("qweight", "scales", "qzeros", "", axis=0, transposed=True, shifts=AWQ_SHIFTS)
# qweight [K/8, N], qzeros [K/G, N/8], scales [K/G, N], g_idx [K]; of 8 bits, 4 for 8
GPTQ = _Words("qweight", "scales", "qzeros", "g_idx", axis=1, transposed=True)
# weight_packed [N, K/8], weight_scale [N, K/G], weight_zero_point [N/8, K/G], with weight_shape
COMPRESSED = _Words("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", axis=1)


def _packed(layout: _Words, module: _Module, scheme: Scheme) -> QuantizedTensor:
    words, shifts = module.matrix(layout.codes, "I32"), layout.shifts or tuple(range(0, 32, scheme.bits))
    outputs, inputs = _shape_of(module, words, layout, len(shifts))
    size = module.divided(scheme.block[1], inputs)

    def shaped(tensor: SafeTensor, rows: int, columns: int) -> SafeTensor:
        return module.shaped(tensor, *((columns, rows) if layout.transposed else (rows, columns)))

    def packed(tensor: SafeTensor, rows: int, columns: int, axis: int, added: int = 0) -> Packed:
        counts = [rows, columns]
        counts[axis] = -(-counts[axis] // len(shifts))
        in_file = 1 - axis if layout.transposed else axis
        return Packed(shaped(tensor, *counts), scheme.bits, shifts, in_file, layout.transposed, added)

    zeros: Grid | int = 1 << (scheme.bits - 1)  # all numbers are stored as if half of their range were added
    if not scheme.symmetric or module.optional(layout.zeros):
        stored_zeros = module.matrix(layout.zeros, "I32")
        zeros = packed(stored_zeros, outputs, inputs // size, axis=0, added=scheme.zeros_less)
    return QuantizedTensor(
        module.name,
        (outputs, inputs),
        packed(words, outputs, inputs, layout.axis),
        Plain(shaped(module.scales(layout.scales), outputs, inputs // size), layout.transposed),
        (1, size),
        zeros,
        _act_order(module, layout.groups, inputs, size),
    )


def _shape_of(module: _Module, words: SafeTensor, layout: _Words, per_word: int) -> tuple[int, int]:
    """Outputs and inputs, which need not fill their words where the file tells them."""
    if layout is not COMPRESSED:
        shape = list(words.shape[::-1])
        shape[layout.axis] *= per_word
        return shape[0], shape[1]
    shape = stored(module.shaped(module.part("weight_shape"), 2)).tolist()
    if not all(isinstance(n, int) and n > 0 for n in shape):
        raise ModelError(
            f"{module.name!r:.120}: weight_shape={shown(shape)} is no shape: download the model again"
        )
    return shape[0], shape[1]


def _act_order(module: _Module, name: str, inputs: int, size: int) -> SafeTensor | None:
    """The group of each input; None: they are in order, as they are in most files that have this tensor."""
    groups = module.optional(name)
    if groups is None:
        return None
    groups = module.shaped(groups, inputs)
    is_in_order = groups.dtype in INTEGERS and (stored(groups) == np.arange(inputs) // size).all()
    return None if is_in_order else groups


def _scaled(module: _Module, scheme: Scheme) -> QuantizedTensor:
    """weight [N, K] of bytes, and weight_scale or weight_scale_inv, which is multiplied with all the same."""
    weight = module.matrix("weight", "I8", *FP8)
    outputs, inputs = weight.shape
    block = scheme.block[0] or max(outputs, 1), scheme.block[1] or max(inputs, 1)
    grid = -(-outputs // block[0]), -(-inputs // block[1])
    name = "weight_zero_point"
    zeros = module.optional(name) if scheme.symmetric else module.part(name)
    return QuantizedTensor(
        module.name,
        (outputs, inputs),
        Plain(weight),
        Plain(module.shaped(module.scales("weight_scale", "weight_scale_inv"), *grid)),
        block,
        0 if zeros is None else Plain(module.shaped(zeros, *grid)),
    )


def _rows_of_bytes(module: _Module, scheme: Scheme) -> QuantizedTensor:
    """weight [N, K] of int8 and SCB [N]: what 127 stands for."""
    weight = module.matrix("weight", "I8")
    form = module.optional("weight_format")
    if form is not None and stored(form).any():
        raise ModelError(
            f"{form.name!r:.120} is not that of plain rows: save the model with a newer bitsandbytes"
        )
    outputs, inputs = weight.shape
    scales = module.shaped(module.scales("SCB"), outputs, 1)
    return QuantizedTensor(
        module.name, (outputs, inputs), Plain(weight), Plain(scales), (1, max(inputs, 1)), unit=1 / 127
    )


def _nibbles_of_blocks(module: _Module, scheme: Scheme) -> QuantizedTensor:
    """weight, all numbers in a row, two in a byte, the first above; a scale for each block of them."""
    state, weight = _state(module), module.part("weight")
    (outputs, inputs), size = state["shape"], state["blocksize"]
    if inputs % 2 or (inputs % size and size % inputs):
        raise ModelError(f"{module.name!r:.120}: blocks of {size} do not fit its {inputs} inputs")
    block = max(size // inputs, 1), min(size, inputs)
    grid = -(-outputs // block[0]), inputs // block[1]
    if weight.dtype != "U8" or math.prod(weight.shape) != outputs * inputs // 2:
        raise ModelError(
            f"{weight.name!r:.120} holds {weight.dtype} of the shape {shown(list(weight.shape))}, not "
            f"{outputs * inputs // 2} numbers of U8"
        )
    return QuantizedTensor(
        module.name,
        (outputs, inputs),
        Packed(weight.viewed(outputs, inputs // 2), 4, (4, 0), axis=1),
        _block_scales(module, state, grid),
        block,
        table=stored(module.shaped(module.part("weight.quant_map"), 16)).astype(F32),
    )


def _block_scales(module: _Module, state: Mapping[str, Any], grid: tuple[int, int]) -> Grid:
    """absmax, of floats or, quantized once more, of bytes; both in a row."""
    num, run = math.prod(grid), state["nested_blocksize"]
    if module.part("weight.absmax").dtype != "U8":
        return Plain(module.shaped(module.scales("weight.absmax"), num).viewed(*grid))
    scales = module.shaped(module.part("weight.absmax"), num).viewed(*grid)
    nested = module.shaped(module.scales("weight.nested_absmax"), -(-num // run))
    table = stored(module.shaped(module.part("weight.nested_quant_map"), 256)).astype(F32)
    return Nested(scales, table, nested, run, state["nested_offset"])


def _state(module: _Module) -> dict[str, Any]:
    """The JSON that lies beside a matrix of 4 bits."""
    tensor = module.part(*(f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")))
    try:
        if math.prod(tensor.shape) > MAX_STATE_BYTES:
            raise ValueError
        state = json.loads(stored(tensor).tobytes())
        outputs, inputs = state["shape"]
        sizes = outputs, inputs, state["blocksize"], state.get("nested_blocksize", 1)
        if any(type(size) is not int or not 0 < size < 1 << 31 for size in sizes):
            raise ValueError
        return {**state, "nested_blocksize": sizes[3], "nested_offset": float(state.get("nested_offset", 0))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{tensor.name!r:.120} makes no sense: download the model again") from error


def _experts_of_mxfp4(tensors: Mapping[str, SafeTensor]) -> Iterator[tuple[str, QuantizedTensor]]:
    """One by one, of gpt-oss's experts.name_blocks [E, N, K/32, 16] and experts.name_scales [E, N, K/32]."""
    for name, blocks in tensors.items():
        if not name.endswith("_blocks"):
            continue
        base = name.removesuffix("_blocks")
        module, _, part = base.rpartition(".")
        scales = _Module(module, tensors).part(part + "_scales")
        if len(blocks.shape) != 4 or blocks.dtype != "U8" or scales.shape[:1] != blocks.shape[:1]:
            raise ModelError(f"{blocks.name!r:.120} is not of MXFP4 experts: download the model again")
        for i in range(blocks.shape[0]):
            yield f"{module}.{i}.{part}.weight", mxfp4(base, blocks.nth(i), scales.nth(i))


def mxfp4(name: str, blocks: SafeTensor, scales: SafeTensor) -> QuantizedTensor:
    """Of gpt-oss's name_blocks [..., N, K/32, 16] and name_scales [..., N, K/32], with all axes before K as
    one: two e2m1 floats in a byte, the first below."""
    *outputs, groups, _ = blocks.shape
    if scales.shape != blocks.shape[:-1] or blocks.shape[-1] * 2 != MX_GROUP or scales.dtype != "U8":
        raise ModelError(f"{scales.name!r:.120} does not fit {blocks.name!r:.120}: download the model again")
    rows, inputs = math.prod(outputs), groups * MX_GROUP
    return QuantizedTensor(
        name,
        (rows, inputs),
        Packed(blocks.viewed(rows, inputs // 2), 4, (0, 4), axis=1),
        Plain(replace(scales, dtype="F8_E8M0").viewed(rows, groups)),
        (1, MX_GROUP),
        table=E2M1,
        unit=0.5,
    )


# By method, and whether several numbers share a word.
BUILDERS: dict[tuple[str, bool], Callable[[_Module, Scheme], QuantizedTensor]] = {
    ("awq", True): partial(_packed, AWQ),
    ("gptq", True): partial(_packed, GPTQ),
    ("bitsandbytes", True): _nibbles_of_blocks,
    ("bitsandbytes", False): _rows_of_bytes,
    ("fp8", False): _scaled,
    ("fbgemm_fp8", False): _scaled,
    ("compressed-tensors", True): partial(_packed, COMPRESSED),
    ("compressed-tensors", False): _scaled,
}
