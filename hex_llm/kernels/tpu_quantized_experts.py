"""Routed experts on TPUs whose weights stay quantized: one Pallas kernel for both of their products.

Pairs lie in the order of their experts, each expert's in blocks of rows of its own. A table tells the kernel
each block's expert, so that what nobody chose is not read; the last of its blocks, which have no rows, read
nothing more and are skipped. What lies in HBM fills whole lanes: widths and inputs are filled up with zeros,
each device's own. A row depends on no other, also in what fills up blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hex_llm.kernels.codes import E2M1_GROUP
from hex_llm.kernels.experts import ExpertOptions, by_expert
from hex_llm.kernels.sharded import Stretch, filled, in_whole_groups
from hex_llm.kernels.tpu_quantized import (
    CENTRE,
    CHUNK,
    MATRIX_BYTES,
    TABLE_ROWS,
    VECTOR_MEMORY,
    is_summed_first,
    multiply_expanded,
    scale_sums,
)
from hex_llm.kernels.tpu_sinks import LANES

MIN_ROWS, MAX_ROWS = 16, 128  # of a block: what fills it up is multiplied too


def can_multiply(group: int) -> bool:
    """Of matrices whose inputs share scales so, on each device; 0: all do."""
    return group % TABLE_ROWS == 0 and (group % CHUNK == 0 or CHUNK % group == 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertColumns:
    """The matrices of experts. A weight is code * scale + offset; gates lie before ups, on each device."""

    codes: Any  # int4, int8 or float8_e4m3fn [E, K, N]
    scales: Any  # float32 [E, groups or more, N]
    offsets: Any | None  # likewise
    group: int = field(metadata={"static": True})  # inputs that share a row of scales; 0: all do
    is_e2m1: bool = field(metadata={"static": True})  # int4 that tpu_quantized.whole_numbers knows


class Codes(NamedTuple):
    """A device's part of quantized matrices [E, *outputs, inputs]: one code in each place."""

    codes: Array
    scales: Array
    offsets: Array | None
    bits: int
    zero: int
    is_e2m1: bool

    @property
    def group(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]


def columns(gate_up: Codes, down: Codes, bias: Array | None, index: Array) -> tuple[Any, Any, Any]:
    """The arrays of ExpertColumns of both, and the bias of gates and ups, of the device with this index.

    Where a group of e2m1 lies on two devices, it came divided, and is made one again."""
    width, group = down.codes.shape[-1], E2M1_GROUP if down.is_e2m1 else down.group
    places = in_whole_groups(index, width, down.group, group, LANES)
    num = gate_up.codes.shape[-1]
    ups = _columns(gate_up, places, Stretch(0, _up(num)), gate_up.group)
    downs = _columns(down, Stretch(0, _up(down.codes.shape[1])), places, group)
    return ups, downs, None if bias is None else filled(bias, 2, *places[::-1])


def _columns(part: Codes, outputs: Stretch, inputs: Stretch, group: int) -> tuple[Any, ...]:
    codes, scales, offsets, bits, zero, is_e2m1 = part

    def turned(array: Array, inputs: Stretch) -> Array:
        array = filled(array, array.ndim - 2, outputs.length, outputs.first)
        array = filled(array, array.ndim - 1, inputs.length, inputs.first)
        return array.reshape(len(array), -1, inputs.length).swapaxes(1, 2)

    def table(array: Array) -> Array:
        """Of whole tiles of rows, or XLA would lay it otherwise, and copy it in each step."""
        if array.shape[-1] == 1:
            rows = turned(array, Stretch(0, 1))
        else:
            rows = turned(array, Stretch(inputs.first // part.group, inputs.length // part.group))
            rows = rows.reshape(len(rows), -1, group // part.group, rows.shape[-1]).max(axis=2)
        return filled(rows, 1, rows.shape[1] + -rows.shape[1] % TABLE_ROWS)

    if is_e2m1:  # twice the floats, of which 8 and 12 are no int4
        codes = jnp.where(jnp.abs(codes) < 8, codes, codes // 2 + jnp.sign(codes)).astype(jnp.int4)
    elif bits == 4:
        codes, zero = (codes.astype(jnp.int8) - CENTRE).astype(jnp.int4), zero - CENTRE
    if zero:
        offsets = (0 if offsets is None else offsets) - zero * scales
    return turned(codes, inputs), table(scales), None if offsets is None else table(offsets)


def _up(size: int) -> int:
    return size + -size % LANES


def fused_moe(
    x: Array,
    chosen: Array,
    scores: Array,
    gate_up: ExpertColumns,
    down: ExpertColumns,
    options: ExpertOptions,
) -> Array:
    """See kernels.experts.RoutedExperts."""
    (num_tokens, per_token), num_experts = chosen.shape, len(gate_up.codes)
    most = pl.next_power_of_2(pl.cdiv(3 * chosen.size, 2 * num_experts))
    rows = min(max(most, MIN_ROWS), MAX_ROWS)
    order, ends = by_expert(chosen, num_experts)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    block_ends = jnp.cumsum(pl.cdiv(ends - starts, rows))
    first_blocks = jnp.concatenate([jnp.zeros(1, jnp.int32), block_ends[:-1]])
    num_blocks = (chosen.size + min(num_experts, chosen.size) * (rows - 1)) // rows  # at most
    # Those too many are the last one again.
    block = jnp.minimum(jnp.arange(num_blocks), block_ends[-1] - 1)
    expert = jnp.sum(block_ends <= block[:, None], axis=1, dtype=jnp.int32)
    start = starts[expert] + (block - first_blocks[expert]) * rows
    # What is behind an expert's last pair are others', which nobody asks for what comes of them.
    pairs = order[jnp.minimum(start[:, None] + jnp.arange(rows), chosen.size - 1)].reshape(-1)

    def product(x: Array, matrix: ExpertColumns) -> Array:
        return _multiply(x, matrix, expert, block_ends[-1:], rows)

    inputs = filled(x, 1, gate_up.codes.shape[1])[pairs // per_token]
    if options.scale_input:
        inputs *= scores.reshape(-1)[pairs, None].astype(x.dtype)
    both = product(inputs, gate_up).reshape(num_blocks, rows, -1)
    if options.bias is not None:
        both += options.bias.reshape(num_experts, -1)[expert][:, None]
    gates, ups = jnp.split(both, 2, axis=-1)
    hidden = options.gated(gates, ups).astype(x.dtype)
    expert_out = product(hidden.reshape(len(inputs), -1), down)
    # Of each pair, counted from the first of its expert's blocks.
    places = jnp.argsort(order).reshape(chosen.shape) - starts[chosen] + first_blocks[chosen] * rows
    # Choice by choice: rows of several choices would first be brought into another layout.
    out = jnp.zeros((num_tokens, expert_out.shape[1]), jnp.float32)
    for i in range(per_token):
        scale = 1 if options.scale_input else scores[:, i, None]
        out += expert_out[places[:, i]].astype(jnp.float32) * scale
    return out[:, : x.shape[1]].astype(x.dtype)


def _multiply(x: Array, matrix: ExpertColumns, expert: Array, num: Array, rows: int) -> Array:
    """x [B * rows, K], of each block its expert [B], of which the first [num] have rows -> [B * rows, N]."""
    codes, scales, offsets = matrix.codes, matrix.scales, matrix.offsets
    _, num_inputs, num_outputs = codes.shape
    group = matrix.group or num_inputs
    few = rows < MAX_ROWS and is_summed_first(rows, group)  # else an expert has several blocks
    most = max(MATRIX_BYTES // (num_inputs * x.dtype.itemsize), LANES)
    width = pl.cdiv(pl.cdiv(num_outputs, pl.cdiv(num_outputs, most)), LANES) * LANES

    def of_block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda i, b, expert, num: (jnp.minimum(b, num[0] - 1), 0))

    def of_expert(length: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, length, width), lambda i, b, expert, num: (expert[b], 0, i))

    arrays, specs = [x, codes, scales], [of_block(rows, num_inputs)]
    specs += [of_expert(array.shape[1]) for array in (codes, scales)]
    if offsets is not None:
        arrays, specs = [*arrays, offsets], [*specs, of_expert(offsets.shape[1])]
    if few and offsets is not None:  # each adds the sum of its group's inputs
        # By a product, which takes far less than sums along lanes.
        of_group = jnp.arange(num_inputs)[:, None] // group == jnp.arange(offsets.shape[1])
        sums = jnp.dot(x, of_group.astype(x.dtype), preferred_element_type=jnp.float32)
        arrays, specs = [*arrays, sums], [*specs, of_block(rows, sums.shape[1])]
    kernel = scale_sums if few else multiply_expanded
    out: Array = pl.pallas_call(
        partial(_kernel, multiply=partial(kernel, group=group, is_e2m1=matrix.is_e2m1), few=few),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(num_outputs, width), len(expert)),
            in_specs=specs,
            out_specs=pl.BlockSpec((rows, width), lambda i, b, expert, num: (jnp.minimum(b, num[0] - 1), i)),
            scratch_shapes=[] if few else [pltpu.VMEM((num_inputs, width), x.dtype)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VECTOR_MEMORY
        ),
        out_shape=jax.ShapeDtypeStruct((len(x), num_outputs), x.dtype),
        name="quantized_experts",
    )(expert, num, *arrays)
    return out


def _kernel(expert: Any, num: Any, *refs: Any, multiply: Any, few: bool) -> None:
    block = pl.program_id(1)

    @pl.when(block < num[0])
    def _() -> None:
        if few:
            multiply(*refs)
        else:
            is_new = (block == 0) | (expert[block] != expert[jnp.maximum(block - 1, 0)])
            multiply(*refs, is_new=is_new)
