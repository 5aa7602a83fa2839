"""Loaded weights in the forms that devices multiply: words on GPUs, columns and rows on TPUs, panels on CPUs.

Each function for a platform is given all weights and replaces the layers one by one, so that they are in
memory twice only one by one. Whose turn it is, execution/kernel_choice.py knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.kernels import cpu, gpu_float8, gpu_quantized, tpu_dense, tpu_quantized, tpu_quantized_experts
from hex_llm.kernels.codes import E2M1_GROUP
from hex_llm.kernels.cpu_quantized import QuantizedPanels, to_quantized_panels
from hex_llm.kernels.gpu_quantized import QuantizedWords
from hex_llm.kernels.sharded import by_device, filled, first_axis, in_whole_groups, sharded
from hex_llm.kernels.tpu_dense import DenseRows, FilledTable
from hex_llm.kernels.tpu_quantized import QuantizedColumns
from hex_llm.kernels.tpu_quantized_experts import Codes, ExpertColumns
from hex_llm.kernels.tpu_sinks import LANES
from hex_llm.models.linear import Dense
from hex_llm.models.params import FeedForward, Weights
from hex_llm.models.quantized import Float8, Quantized
from hex_llm.parallel.shardings import TP

# Chips that multiply 256 × 256 at a time: what XLA does beside a product holds them up.
WITH_LARGE_UNITS = "TPU v6", "TPU7"
Change = Callable[[Any], Any]  # of a matrix, or of routed experts
Make = Callable[[Callable[[Any], Any], Any, Any], Any]  # of a function, its argument, and how its results lie


def _is_matrix(part: Any) -> bool:
    return isinstance(part, Dense | Quantized)


def _is_whole_part(part: Any) -> bool:
    """The matrices of experts lie otherwise than all others."""
    return _is_matrix(part) or (isinstance(part, FeedForward) and part.router is not None)


def _each_layer(weights: Weights, change_part: Change, change_table: Change | None = None) -> Weights:
    """Tables are the embedding and the head."""

    def everywhere(change: Change, tree: Any) -> Any:
        return jax.tree.map(change, tree, is_leaf=_is_whole_part)

    for i, layer in enumerate(weights.layers):
        weights.layers[i] = everywhere(change_part, layer)
    embed, head = (everywhere(change_table or change_part, table) for table in (weights.embed, weights.head))
    return replace(weights, embed=embed, head=head)


# ---- GPUs


def for_gpus(weights: Weights, is_alone: bool, can_gate: bool, hold: Change | None = None) -> Weights:
    """On a GPU that is alone our own kernels round what no norm gives to a Float8; and where they `can_gate`,
    make of gates and ups what goes on. `hold`: instead of over_gpus."""
    rounds = gpu_float8.can_round()
    weights = _each_layer(
        weights, partial(_for_gpus, hold=hold or over_gpus, as_float8=rounds or not is_alone)
    )
    if is_alone:
        for i, layer in enumerate(weights.layers):
            qkv, out = _with_kernel(layer.qkv), _alone(layer.out)
            weights.layers[i] = replace(layer, qkv=qkv, out=out, ffn=_ffn_alone(layer.ffn, can_gate))
    return weights


def _for_gpus(part: Any, hold: Change, as_float8: bool) -> Any:
    """`as_float8`: what can be multiplied by activations of 8 bits."""
    if isinstance(part, FeedForward):
        change = partial(_for_gpus, hold=hold, as_float8=as_float8)
        shared = jax.tree.map(change, part.shared, is_leaf=_is_matrix)
        part = _in_whole_groups(part) if _has_cut_groups(part.down) else part
        return replace(part, gate_up=hold(part.gate_up), down=hold(part.down), shared=shared)
    if as_float8 and isinstance(part, Quantized) and part.is_whole:
        outputs = part.codes.shape[: part.num_outputs]
        return Float8(part.codes, part.scales.reshape(*outputs, -1)[..., 0])
    return hold(part)


def over_gpus(part: Any) -> Any:
    """What is not quantized stays."""
    if not isinstance(part, Quantized):
        return part
    lies = part.codes.sharding
    return sharded(by_device(in_words, lies)(part), lies.mesh, lies.spec, part.num_outputs)


def in_words(part: Quantized) -> QuantizedWords:
    """As one GPU's kernels hold it."""
    arrays, is_float = (part.unpacked(), part.scales, part.offsets), part.codes.dtype == jnp.float8_e4m3fn
    kind: dict[str, Any] = {"bits": part.bits, "zero": part.zero, "is_float": is_float or part.is_e2m1}
    return gpu_quantized.to_words(*arrays, num_output_axes=part.num_outputs, **kind)


def _has_cut_groups(part: Any) -> bool:
    return isinstance(part, Quantized) and part.is_e2m1 and part.group < E2M1_GROUP


def _in_whole_groups(part: FeedForward) -> FeedForward:
    """Experts whose groups of inputs lie on two devices, and so came divided, with whole ones again."""
    given = part.gate_up, part.down, part.gate_up_bias
    lies = part.gate_up.codes.sharding
    whole = _whole_groups(lies.mesh, jax.tree.map(lambda array: array.sharding.spec, given))
    gate_up, down, bias = whole(given)
    return replace(part, gate_up=gate_up, down=down, gate_up_bias=bias)


@cache
def _whole_groups(mesh: Any, lie: Any) -> Callable[[Any], Any]:
    def local(gate_up: Quantized, down: Quantized, bias: Array | None) -> tuple[Any, ...]:
        width, group = down.codes.shape[-1] * 2, down.group
        first, length = in_whole_groups(jax.lax.axis_index(TP), width, group, E2M1_GROUP, unit=E2M1_GROUP)
        put = partial(filled, axis=2, length=length, first=first)
        ups = replace(gate_up, codes=put(gate_up.codes), scales=_of_zeros(put(gate_up.scales)))
        codes = filled(down.codes, axis=2, length=length // 2, first=first // 2)
        scales = filled(down.scales, axis=2, length=length // group, first=first // group)
        scales = scales.reshape(*scales.shape[:2], -1, E2M1_GROUP // group).max(axis=-1)
        downs = replace(down, codes=codes, scales=_of_zeros(scales))
        return ups, downs, None if bias is None else put(bias)

    out = P(None, None, TP)
    return jax.jit(
        lambda given: jax.shard_map(local, mesh=mesh, in_specs=lie, out_specs=out, check_vma=False)(*given)
    )


def _of_zeros(scales: Array) -> Array:
    """A scale of 0 has no exponent: what fills a matrix up is scaled by 1."""
    return jnp.where(scales == 0, 1, scales)


def _ffn_alone(ffn: FeedForward, can_gate: bool) -> FeedForward:
    gate_up, down = _with_kernel(ffn.gate_up), _alone(ffn.down)
    if isinstance(gate_up, Float8) and isinstance(down, Float8):
        gate_up = replace(gate_up, rounds_gated=can_gate)
    elif isinstance(gate_up, Dense | QuantizedWords) and ffn.router is None:
        gate_up = replace(gate_up, fuses_gates=can_gate)
    shared = None if ffn.shared is None else _ffn_alone(ffn.shared, can_gate)
    return replace(ffn, gate_up=gate_up, down=down, shared=shared)


def _alone(matrix: Any) -> Any:
    matrix = _with_kernel(matrix)
    return replace(matrix, rounds_rows=True) if isinstance(matrix, Float8) else matrix


def _with_kernel(matrix: Any) -> Any:
    return replace(matrix, has_kernel=True) if isinstance(matrix, Dense | Float8) else matrix


# ---- TPUs


def _compiled(function: Callable[[Any], Any], part: Any, lies: Any) -> Any:
    return jax.jit(function, out_shardings=lies)(part)


def for_tpus(weights: Weights, make: Make = _compiled, mesh: Any = None) -> Weights:
    """What is quantized in columns, or expanded; of layers all else in rows, on chips that gain by it; tables
    in whole lanes. `make` is for arrays that are only described; kernels are then lowered for `mesh`."""
    norm = weights.norm
    kind = _kind_of(mesh or norm.sharding.mesh)
    with_rows = norm.dtype == jnp.bfloat16 and kind.startswith(WITH_LARGE_UNITS)

    def change_table(table: Any) -> Any:
        if not isinstance(table, Dense):
            return over_tpus(table, make, mesh)
        fills_lanes = table.array.shape[1] % LANES == 0
        return table if fills_lanes else make(_in_table, table, table.array.sharding)

    change_part = partial(over_tpus, make=make, mesh=mesh, with_rows=with_rows)
    return _each_layer(weights, change_part, change_table)


def _in_table(part: Dense) -> FilledTable:
    return tpu_dense.to_table(part.array)


def _kind_of(mesh: Mesh | AbstractMesh) -> str:
    return str((mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device).device_kind)


def over_tpus(part: Any, make: Make = _compiled, mesh: Any = None, with_rows: bool = False) -> Any:
    if isinstance(part, FeedForward):
        return _experts_over_tpus(part, make, mesh, with_rows)
    if isinstance(part, Quantized):
        lies, lay_out = part.codes.sharding, by_device(in_columns, part.codes.sharding)
        described = jax.eval_shape(lay_out, part)
        if not tpu_quantized.can_multiply(described.codes.shape, described.scales.shape):
            return _expanded(part, make)
    elif isinstance(part, Dense) and with_rows:
        lies, lay_out = part.array.sharding, by_device(in_rows, part.array.sharding)
        if not tpu_dense.can_multiply(jax.eval_shape(lay_out, part).array.shape):
            return part
    else:
        return part
    shard = make(lay_out, part, NamedSharding(lies.mesh, first_axis(lies.spec)))
    return sharded(shard, mesh or lies.mesh, lies.spec, part.num_outputs)


def in_rows(part: Dense) -> DenseRows:
    return tpu_dense.to_rows(part.array, num_output_axes=part.num_outputs)


def in_columns(part: Quantized) -> QuantizedColumns:
    """As one TPU's kernel holds it."""
    arrays, axes = (part.whole_numbers(), part.scales, part.offsets), part.num_outputs
    return tpu_quantized.to_columns(*arrays, num_output_axes=axes, bits=part.number_bits, zero=part.zero)


def _experts_over_tpus(part: FeedForward, make: Make, mesh: Any, with_rows: bool) -> FeedForward:
    """One kernel is for both matrices of experts, or for none."""
    change = partial(over_tpus, make=make, mesh=mesh, with_rows=with_rows)
    shared = jax.tree.map(change, part.shared, is_leaf=_is_matrix)
    both = part.gate_up, part.down
    if not all(map(_fits_expert_columns, both)):
        gate_up, down = (_expanded(one, make) if isinstance(one, Quantized) else one for one in both)
        return replace(part, gate_up=gate_up, down=down, shared=shared)
    given, on = (*both, part.gate_up_bias), part.gate_up.codes.sharding.mesh
    # Of what all inputs share there is one.
    lie = jax.tree.map(lambda array: P(None, None, TP) if array.shape[2] > 1 else P(), given)
    columns, made = _expert_columns(on, lie)

    def laid_out(one: Quantized, arrays: Any) -> Any:
        codes, scales, offsets = arrays
        shard = ExpertColumns(codes, scales, offsets, _group(one), one.is_e2m1)
        return sharded(shard, mesh or on, one.codes.sharding.spec, one.num_outputs)

    ups, downs, bias = make(columns, given, tuple(NamedSharding(on, spec) for spec in made))
    gate_up, down = laid_out(part.gate_up, ups), laid_out(part.down, downs)
    return replace(part, gate_up=gate_up, down=down, gate_up_bias=bias, shared=shared)


@cache  # one compilation for all layers
def _expert_columns(mesh: Any, lie: Any) -> tuple[Callable[[Any], Any], tuple[P, ...]]:
    """Takes matrices and the bias of experts, which lie so; and how what it makes of them lies."""
    made = P(TP), P(TP), P(None, None, TP)

    def codes(one: Quantized) -> Codes:
        return Codes(one.whole_numbers(), one.scales, one.offsets, one.bits, one.zero, one.is_e2m1)

    def local(gate_up: Quantized, down: Quantized, bias: Any) -> tuple[Any, ...]:
        return tpu_quantized_experts.columns(codes(gate_up), codes(down), bias, jax.lax.axis_index(TP))

    def columns(given: tuple[Any, ...]) -> Any:
        return jax.shard_map(local, mesh=mesh, in_specs=lie, out_specs=made, check_vma=False)(*given)

    return columns, made


def _fits_expert_columns(part: Any) -> bool:
    return isinstance(part, Quantized) and tpu_quantized_experts.can_multiply(_group(part))


def _group(part: Quantized) -> int:
    """As the kernel has it; 0: all inputs of a device."""
    if part.is_e2m1:
        return E2M1_GROUP
    return 0 if part.is_whole else part.group


def _expanded(part: Quantized, make: Make) -> Any:
    return make(_in_bfloat16, part, part.codes.sharding)


def _in_bfloat16(part: Quantized) -> Dense:
    return part.expanded(jnp.bfloat16)


# ---- CPUs


def for_cpu(weights: Weights, width: int) -> Weights:
    return _each_layer(weights, partial(_in_panels, width=width))


def _in_panels(part: Any, width: int) -> Any:
    """Gates and ups [F, 2, D] are turned round, so that gates, and ups, lie side by side."""
    change = partial(_in_panels, width=width)
    if isinstance(part, Dense):
        return cpu.to_panels(part.array, part.num_outputs, width, turned=part.num_outputs == 2)
    if isinstance(part, Quantized):
        return _quantized_panels(part)
    if not isinstance(part, FeedForward):
        return part
    gate_up = tuple(change(one) for one in _by_expert(part.gate_up, lambda array: array.swapaxes(0, 1)))
    down = tuple(change(one) for one in _by_expert(part.down, lambda array: array))
    shared = jax.tree.map(change, part.shared, is_leaf=_is_matrix)
    return replace(part, gate_up=gate_up, down=down, shared=shared)


def _quantized_panels(matrix: Quantized) -> QuantizedPanels:
    width = cpu.quantized_panel_width()
    assert width is not None, "quantized matrices were planned for a processor that does not multiply them"
    return to_quantized_panels(
        matrix.whole_numbers(),
        matrix.scales,
        matrix.offsets,
        num_output_axes=matrix.num_outputs,
        bits=matrix.number_bits,
        zero=matrix.zero,
        width=width,
        turned=matrix.num_outputs == 2,
    )


def _by_expert(experts: Any, arrange: Callable[[jax.Array], jax.Array]) -> list[Any]:
    """The matrices of experts [E, ...] one by one, with their arrays arranged."""
    alone = replace(experts, num_outputs=experts.num_outputs - 1)
    num = len(jax.tree.leaves(experts)[0])
    return [jax.tree.map(lambda array, i=i: arrange(array[i]), alone) for i in range(num)]
