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

from hex_llm.errors import ConfigError
from hex_llm.models.linear import Dense
from hex_llm.models.params import Param, Weights, abstract_weights
from hex_llm.models.quantized import Quantized
from hex_llm.models.spec import ModelSpec
from hex_llm.weights.checkpoint import Checkpoint, Tensor
from hex_llm.weights.grouped import Form, Part, PartName, form_of

EXPANDED, BITS = "none", {"int8": 8, "int4": 4}  # what --quantization can ask for
GROUPS = {8: 128, 4: 32}  # inputs that share a scale in what is quantized here

Keeps = Callable[[Form], bool]  # whether matrices of this form are multiplied as they are


@dataclass(frozen=True)
class WeightPlan:
    weights: Weights  # of Params
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # tensors that the checkpoint does not name


def plan_weights(
    spec: ModelSpec,
    checkpoint: Checkpoint | None = None,
    num_devices: int = 1,
    keeps: Keeps = lambda form: False,
    quantization: str | None = None,
) -> WeightPlan:
    """`spec`: as it is split over the devices. `quantization`: as the flag says it. ConfigError: what it asks
    for cannot be multiplied here."""
    bits = BITS.get(quantization or "")
    if bits is not None and not keeps(Form(bits, GROUPS[bits], has_offsets=bits == 4)):
        raise ConfigError(f"--quantization={quantization}: there is no kernel for it on these devices yet")
    weights = abstract_weights(spec)
    if quantization == EXPANDED:
        return WeightPlan(weights)
    stored, parts = checkpoint or {}, dict[str, Tensor]()

    def plan(matrix: Any) -> Any:
        if not isinstance(matrix, Dense):
            return matrix
        param: Param = matrix.array
        if bits is None:
            form = _common_form(param, stored, num_devices)
            return matrix if form is None or not keeps(form) else _quantized(matrix, form, stored, parts)
        wanted = Form(bits, math.gcd(GROUPS[bits], _last_axis(param, num_devices)))
        if param.axes[0] == "vocab" or not keeps(wanted):
            return matrix
        return replace(matrix, array=replace(param, rounded_to=(wanted.bits, wanted.group)))

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
    if len(kinds) > 1 or None in kinds or any(piece.order for piece in param.pieces):
        return None
    alike = [form for form in forms if form is not None]
    group = math.gcd(_last_axis(param, num_devices), *(form.group for form in alike))
    return alike[0]._replace(group=group)


def _quantized(matrix: Dense, form: Form, checkpoint: Checkpoint, parts: dict[str, Tensor]) -> Quantized:
    def declared(part: PartName) -> Param:
        group = 1 if part == "codes" else form.group
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
    return Quantized(codes, scales, offsets, form.bits, form.zero, matrix.num_outputs)
