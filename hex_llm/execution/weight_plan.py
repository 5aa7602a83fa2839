"""Which matrices of a model are held quantized, and in which arrays these then lie.

A checkpoint's matrices stay as they are where the devices can multiply them so; all else is loaded as floats.
Those of a plain one can be quantized once they are loaded, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from hex_llm.models.linear import Dense
from hex_llm.models.params import Param, Rounding, Weights, abstract_weights
from hex_llm.models.quantized import Quantized
from hex_llm.models.spec import ModelSpec
from hex_llm.weights.checkpoint import Checkpoint, Tensor
from hex_llm.weights.grouped import Form, Part, PartName, form_of

# What --quantization can ask for besides what the checkpoint is.
EXPANDED = "none"
FORMS = {
    "int8": Form(8, group=128),
    "int4": Form(4, group=32, has_offsets=True),
    "fp8": Form(8, group=0, is_float=True),
}

# Whether matrices of this form are multiplied as they are; of routed experts, with True.
Keeps = Callable[[Form, bool], bool]


@dataclass(frozen=True)
class WeightPlan:
    weights: Weights  # of Params
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that the checkpoint does not name


def plan_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint | None = None,
    num_devices: int = 1,
    keeps: Keeps = lambda form, routed: False,
    rounded_to: Form | None = None,
) -> WeightPlan:
    """`spec`: as it is split over the devices. `rounded_to`: how a plain checkpoint is quantized;
    a group of 0 is all inputs."""
    weights = abstract_weights(spec)
    stored, parts = checkpoint or {}, dict[str, Tensor]()

    def plan(matrix: Any) -> Any:
        if not isinstance(matrix, Dense):
            return matrix
        param: Param = matrix.array
        routed = param.axes[0] == "experts"
        if rounded_to is None:
            form = _common_form(param, stored, num_devices)
            is_kept = form is not None and keeps(form, routed)
            last = _last_axis(param, num_devices)
            return _quantized(matrix, form, stored, parts, last) if form and is_kept else matrix
        wanted = _divided(rounded_to, _last_axis(param, num_devices))
        if param.axes[0] == "vocab" or not keeps(wanted, routed):
            return matrix
        if wanted.is_e2m1 and not routed:  # all that files hold so
            return matrix
        rounding = Rounding(wanted.bits, wanted.group, wanted.is_float)
        return replace(matrix, array=replace(param, rounded_to=rounding))

    weights = jax.tree.map(plan, weights, is_leaf=lambda node: isinstance(node, Dense | Param))
    return WeightPlan(weights, parts)


def quantized_bytes(weights: Weights, dtype: np.dtype[Any]) -> tuple[int, int]:
    """Of the matrices that are quantized, on each device: what they take, and what they would as floats."""

    def held(array: jax.Array) -> int:
        return math.prod(array.sharding.shard_shape(array.shape)) * array.itemsize

    matrices = [m for m in jax.tree.leaves(weights, is_leaf=_is_quantized) if _is_quantized(m)]
    taken = sum(held(array) for array in jax.tree.leaves(matrices))
    return taken, sum(held(matrix.codes) * 8 // matrix.bits for matrix in matrices) * dtype.itemsize


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def _last_axis(param: Param, num_devices: int) -> int:
    """What a device holds of it: a group must not lie on two."""
    return param.shape[-1] // (num_devices if param.axes[-1] else 1)


def _common_form(param: Param, checkpoint: Checkpoint, num_devices: int) -> Form | None:
    """How all its pieces are quantized, with groups as fine as the finest of them; None: not all alike."""
    forms = {form_of(checkpoint.get(piece.name)) for piece in param.pieces}
    kinds = {None if form is None else form._replace(group=0) for form in forms}
    turned = any(piece.order and piece.order[-1] != len(piece.order) - 1 for piece in param.pieces)
    if len(kinds) > 1 or None in kinds or turned:
        return None
    alike = [form for form in forms if form is not None]
    finest = alike[0]._replace(group=math.gcd(*(form.group for form in alike)))
    return _divided(finest, _last_axis(param, num_devices))


def _divided(form: Form, last: int) -> Form:
    """With groups that divide so many inputs; of floats of 8 bits, all can stay one."""
    is_whole = form.is_float and form.bits == 8 and not form.group
    return form if is_whole else form._replace(group=math.gcd(form.group, last))


def _quantized(
    matrix: Dense, form: Form, checkpoint: Checkpoint, parts: dict[str, Tensor], last: int
) -> Quantized:
    """`last`: inputs that one device has."""

    def declared(part: PartName) -> Param:
        group = 1 if part == "codes" else form.group or last
        param, pieces = matrix.array, []
        for piece in param.pieces:
            tensor: Any = Part(checkpoint[piece.name], part, group)  # type: ignore[arg-type]
            name = f"{piece.name}#{part}/{group}"
            parts[name] = tensor
            axis, offset = piece.start
            start = axis, offset // group if axis == len(piece.shape) - 1 else offset
            view = *piece.view[:-1], piece.view[-1] // group
            pieces.append(replace(piece, name=name, shape=tensor.shape, view=view, start=start))
        dtype = form.dtype if part == "codes" else np.dtype(np.float32)
        shape = *param.shape[:-1], param.shape[-1] // group
        return Param(shape, param.axes, tuple(pieces), dtype, packed=part == "codes" and form.bits == 4)

    offsets = declared("offsets") if form.has_offsets else None
    codes, scales = declared("codes"), declared("scales")
    kind = form.bits, form.zero, matrix.num_outputs, form.is_e2m1, not form.group
    return Quantized(codes, scales, offsets, *kind)
