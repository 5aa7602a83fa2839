"""Which kernels, form of weights and width of pages a model gets on its devices: the one place that knows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.config import EngineConfig
from hex_llm.kernels import (
    cpu,
    cpu_experts,
    experts,
    gpu,
    gpu_adapters,
    gpu_experts,
    gpu_float8,
    gpu_quantized,
    gpu_routing,
    reference,
    tpu,
    tpu_experts,
    tpu_quantized,
    tpu_quantized_experts,
)
from hex_llm.kernels.adapters import AdapterKernels
from hex_llm.kernels.attention import LARGEST, AttentionKernels, Batch, KVPages, Options, empty_pages
from hex_llm.kernels.cpu_quantized import QuantizedPanels, block_of, to_quantized_panels
from hex_llm.kernels.experts import ExpertKernels
from hex_llm.kernels.gpu_launch import MIN_DOT
from hex_llm.kernels.gpu_quantized import QuantizedWords
from hex_llm.kernels.sharded import by_device, first_axis, sharded
from hex_llm.kernels.tpu_quantized import QuantizedColumns
from hex_llm.kernels.tpu_quantized_experts import Codes, ExpertColumns
from hex_llm.models.adapters import add_by_all
from hex_llm.models.linear import Dense
from hex_llm.models.params import FeedForward, Weights
from hex_llm.models.quantized import Float8, Quantized
from hex_llm.models.spec import Heads, ModelSpec
from hex_llm.parallel.shardings import TP
from hex_llm.weights.grouped import Form

log = logging.getLogger(__name__)

FLOAT8 = np.dtype(jnp.float8_e4m3fn)
DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
KV_DTYPES = DTYPES | {"fp8": FLOAT8, "fp8_e4m3": FLOAT8, "int8": np.int8}
MAX_SINGLE = 32  # a launch for chunks costs more than reading what some tokens see several times


class Kernels(NamedTuple):
    attention: AttentionKernels
    experts: ExpertKernels
    page_width: Callable[[int], int]  # numbers of a key in its page, of those in its head
    max_single: int  # a step of so many tokens is as fast if each attends by itself
    lay_out: Callable[[Weights], Weights]  # loaded weights, whose matrices get the form that is multiplied
    can_multiply: Callable[[Form, bool], bool]  # a quantized matrix as it is; True: of routed experts
    adapter_kernels: AdapterKernels = AdapterKernels(add_by_all)
    empty_pages: Callable[[tuple[int, ...], np.dtype[Any]], Any] = empty_pages  # in the attention's own form


class Devices(NamedTuple):
    """What a choice depends on besides the model."""

    platform: str
    num: int
    block_size: int
    dtype: np.dtype[Any]
    kv_dtype: np.dtype[Any]

    @classmethod
    def of(cls, config: EngineConfig, platform: str, num: int, dtype: np.dtype[Any]) -> Devices:
        """For activations in this type."""
        asked = config.kv_cache_dtype
        kv_dtype = dtype if asked == "auto" else np.dtype(KV_DTYPES[asked])
        return cls(platform, num, config.block_size, dtype, kv_dtype)


@cache
def choose_kernels(spec: ModelSpec, devices: Devices) -> Kernels:
    panel_width = _panel_width(spec, devices)
    if panel_width is not None:
        lay_out = partial(_each_layer, partial(_in_panels, width=panel_width), is_part=is_whole_part)
        is_plain = devices.kv_dtype == np.float32
        attention = AttentionKernels(cpu.paged_attention if is_plain else reference.paged_attention)
        max_single = sys.maxsize if is_plain else MAX_SINGLE
        routed = ExpertKernels(experts.choose, cpu_experts.fused_moe)
        return Kernels(attention, routed, _whole, max_single, lay_out, _lies_in_panels)
    width, pages = _whole, empty_pages
    if _attends_on_tpu(spec, devices):
        width, pages = tpu.padded_head_dim, tpu.empty_pages
    attention, routed = _attention(spec, devices), _experts(spec, devices)
    can_multiply = partial(_can_multiply, spec=spec, devices=devices)
    changes: dict[str, Callable[[Any], Any]] = {"gpu": _for_gpus, "tpu": for_tpus}
    lay_out = partial(_each_layer, changes.get(devices.platform, lambda part: part), is_part=is_whole_part)
    if devices.platform == "gpu" and devices.num == 1:
        can_gate = gpu_experts.can_fuse(spec.activation, devices.dtype)
        lay_out = partial(_with_rounding, lay_out, can_gate=can_gate)
    adapters = _adapters(spec, devices)
    return Kernels(attention, routed, width, MAX_SINGLE, lay_out, can_multiply, adapters, pages)


def _whole(head_dim: int) -> int:
    return head_dim


def page_shapes(spec: ModelSpec, devices: Devices, num_blocks: int) -> list[tuple[int, ...]]:
    """Of each layer's pages."""
    width, heads = choose_kernels(spec, devices).page_width, map(spec.heads_of, spec.layers)
    return [(num_blocks, devices.block_size, one.num_kv, 2, width(one.dim)) for one in heads]


def _can_multiply(form: Form, routed: bool, spec: ModelSpec, devices: Devices) -> bool:
    """CPUs expand what they multiply; accelerators would be slower for it than with floats."""
    if devices.platform == "tpu":
        fits = not routed or tpu_quantized_experts.can_multiply(form.group)
        return devices.dtype == jnp.bfloat16 and fits
    if devices.platform == "cpu":
        return True
    if not form.group and not routed:
        return devices.dtype != np.float32
    fits = not routed or gpu_experts.can_fuse(spec.activation, devices.dtype)
    return fits and gpu_quantized.can_multiply(form.bits, form.group, devices.dtype, form.is_float)


def _for_gpus(part: Any) -> Any:
    """A matrix that was loaded as `_can_multiply` allows, or routed experts."""
    if isinstance(part, FeedForward):
        shared = jax.tree.map(_for_gpus, part.shared, is_leaf=_is_matrix)
        return replace(part, gate_up=over_gpus(part.gate_up), down=over_gpus(part.down), shared=shared)
    if isinstance(part, Quantized) and part.is_whole:
        outputs = part.codes.shape[: part.num_outputs]
        return Float8(part.codes, part.scales.reshape(*outputs, -1)[..., 0])
    return over_gpus(part)


def over_gpus(part: Any) -> Any:
    """What is not quantized stays."""
    if not isinstance(part, Quantized):
        return part
    lies = part.codes.sharding
    return sharded(by_device(in_words, lies)(part), lies.mesh, lies.spec, part.num_outputs)


def _with_rounding(lay_out: Callable[[Weights], Weights], weights: Weights, can_gate: bool) -> Weights:
    """Laid out for one GPU: what no norm gives to a Float8 is rounded by our own kernels, if it has floats of
    8 bits."""
    weights = lay_out(weights)
    if gpu_float8.can_round():
        for i, layer in enumerate(weights.layers):
            weights.layers[i] = replace(
                layer, out=_rounding(layer.out), ffn=_ffn_rounding(layer.ffn, can_gate)
            )
    return weights


def _ffn_rounding(ffn: FeedForward, can_gate: bool) -> FeedForward:
    gate_up, down = ffn.gate_up, _rounding(ffn.down)
    if isinstance(gate_up, Float8) and isinstance(down, Float8):
        gate_up = replace(gate_up, rounds_gated=can_gate)
    shared = None if ffn.shared is None else _ffn_rounding(ffn.shared, can_gate)
    return replace(ffn, gate_up=gate_up, down=down, shared=shared)


def _rounding(matrix: Any) -> Any:
    return replace(matrix, rounds_rows=True) if isinstance(matrix, Float8) else matrix


def in_words(part: Quantized) -> QuantizedWords:
    """As one GPU's kernels hold it."""
    arrays, is_float = (part.unpacked(), part.scales, part.offsets), part.codes.dtype == jnp.float8_e4m3fn
    kind: dict[str, Any] = {"bits": part.bits, "zero": part.zero, "is_float": is_float or part.is_e2m1}
    return gpu_quantized.to_words(*arrays, num_output_axes=part.num_outputs, **kind)


def _compiled(function: Callable[[Any], Any], part: Any, lies: NamedSharding) -> Any:
    return jax.jit(function, out_shardings=lies)(part)


def for_tpus(part: Any, make: Callable[..., Any] = _compiled, mesh: Any = None) -> Any:
    """Likewise; what the kernel is not for is expanded. `make`: a function, its argument and how its results
    lie, for arrays that are only described; kernels are then lowered for `mesh`."""
    if isinstance(part, FeedForward):
        return _experts_for_tpus(part, make, mesh)
    if not isinstance(part, Quantized):
        return part
    lies = part.codes.sharding
    lay_out = by_device(in_columns, lies)
    described = jax.eval_shape(lay_out, part)
    if not tpu_quantized.can_multiply(described.codes.shape, described.scales.shape):
        return _expanded(part, make)
    columns = make(lay_out, part, NamedSharding(lies.mesh, first_axis(lies.spec)))
    return sharded(columns, mesh or lies.mesh, lies.spec, part.num_outputs)


def in_columns(part: Quantized) -> QuantizedColumns:
    """As one TPU's kernel holds it."""
    arrays, axes = (part.whole_numbers(), part.scales, part.offsets), part.num_outputs
    return tpu_quantized.to_columns(*arrays, num_output_axes=axes, bits=part.number_bits, zero=part.zero)


def _experts_for_tpus(part: FeedForward, make: Callable[..., Any], mesh: Any) -> FeedForward:
    """One kernel is for both matrices of experts, or for none."""
    shared = jax.tree.map(partial(for_tpus, make=make, mesh=mesh), part.shared, is_leaf=_is_matrix)
    both = part.gate_up, part.down
    if not all(map(_fits_expert_columns, both)):
        gate_up, down = (_expanded(one, make) if isinstance(one, Quantized) else one for one in both)
        return replace(part, gate_up=gate_up, down=down, shared=shared)
    given, on = (*both, part.gate_up_bias), part.gate_up.codes.sharding.mesh
    # Of what all inputs share there is one.
    lie = jax.tree.map(lambda array: P(None, None, TP) if array.shape[2] > 1 else P(), given)
    made = P(TP), P(TP), P(None, None, TP)

    def codes(one: Quantized) -> Codes:
        return Codes(one.whole_numbers(), one.scales, one.offsets, one.bits, one.zero, one.is_e2m1)

    def local(gate_up: Quantized, down: Quantized, bias: Any) -> tuple[Any, ...]:
        return tpu_quantized_experts.columns(codes(gate_up), codes(down), bias, jax.lax.axis_index(TP))

    def columns(given: tuple[Any, ...]) -> Any:
        return jax.shard_map(local, mesh=on, in_specs=lie, out_specs=made, check_vma=False)(*given)

    def laid_out(one: Quantized, arrays: Any) -> Any:
        codes, scales, offsets = arrays
        shard = ExpertColumns(codes, scales, offsets, _group(one), one.is_e2m1)
        return sharded(shard, mesh or on, one.codes.sharding.spec, one.num_outputs)

    ups, downs, bias = make(columns, given, tuple(NamedSharding(on, spec) for spec in made))
    gate_up, down = laid_out(part.gate_up, ups), laid_out(part.down, downs)
    return replace(part, gate_up=gate_up, down=down, gate_up_bias=bias, shared=shared)


def _fits_expert_columns(part: Any) -> bool:
    return isinstance(part, Quantized) and tpu_quantized_experts.can_multiply(_group(part))


def _group(part: Quantized) -> int:
    """As the kernel has it; 0: all inputs of a device."""
    if part.is_e2m1:
        return tpu_quantized_experts.E2M1_GROUP
    return 0 if part.is_whole else part.codes.shape[-1] * 8 // part.bits // part.scales.shape[-1]


def _expanded(part: Quantized, make: Callable[..., Any]) -> Any:
    return make(lambda part: part.expanded(jnp.bfloat16), part, part.codes.sharding)


def _panel_width(spec: ModelSpec, devices: Devices) -> int | None:
    """None: the CPU's own kernels are not for this model or these devices."""
    if devices.num > 1 or devices.platform != "cpu" or devices.dtype != np.float32:
        return None
    width = cpu.panel_width()
    fits = width is not None and all(
        heads.dim % (width // cpu.PANEL_VECTORS) == 0 for heads in spec.all_heads
    )
    return width if fits else None


def _lies_in_panels(form: Form, routed: bool) -> bool:
    if cpu.quantized_panel_width() is None or (form.is_float and not form.is_e2m1):
        return False
    return block_of(8 if form.is_e2m1 else form.bits, form.group) is not None


def _is_matrix(part: Any) -> bool:
    return isinstance(part, Dense | Quantized)


def is_whole_part(part: Any) -> bool:
    """The matrices of experts lie otherwise than all others."""
    return _is_matrix(part) or (isinstance(part, FeedForward) and part.router is not None)


def _each_layer(change: Callable[[Any], Any], weights: Weights, is_part: Callable[[Any], bool]) -> Weights:
    """The layers of the given weights are replaced one by one, so that they are in memory twice only one by
    one. `change` gets the parts."""
    everywhere = partial(jax.tree.map, change, is_leaf=is_part)
    for i, layer in enumerate(weights.layers):
        weights.layers[i] = everywhere(layer)
    return replace(weights, embed=everywhere(weights.embed), head=everywhere(weights.head))


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


def _attention(spec: ModelSpec, devices: Devices) -> AttentionKernels:
    """The kernel for these devices, or the reference where there is none for them or for this model."""
    if _attends_on_tpu(spec, devices):
        return AttentionKernels(tpu.paged_attention)
    without = [heads for heads in spec.all_heads if not _attends_on_gpu(heads, devices)]
    if devices.platform != "cpu" and without:
        sizes = " and ".join(str(size) for size in sorted({heads.dim for heads in without}))
        kind = f"heads of {sizes}{' with sinks' * spec.sinks} in {devices.dtype}"
        kind += f" and pages in {devices.kv_dtype}" * (devices.kv_dtype != devices.dtype)
        log.warning("no attention kernel for %s: a slower one is used", kind)
    if devices.platform == "gpu" and len(without) < len(spec.all_heads):
        if without:
            return AttentionKernels(_attend_on_gpus)
        return AttentionKernels(gpu.paged_attention, gpu.projected_attention)
    return AttentionKernels(reference.paged_attention)


def _attends_on_gpu(heads: Heads, devices: Devices) -> bool:
    return devices.platform == "gpu" and gpu.can_attend(heads.group_size, heads.dim, devices.dtype)


def _attend_on_gpus(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: KVPages, batch: Batch, options: Options
) -> tuple[jax.Array, KVPages]:
    """For models of whose layers not all have heads that the kernel is for."""
    group, head_dim = q.shape[2:]
    attend = gpu.paged_attention if gpu.can_attend(group, head_dim, q.dtype) else reference.paged_attention
    return attend(q, k, v, pages, batch, options)


def _attends_on_tpu(spec: ModelSpec, devices: Devices) -> bool:
    masks, sinks, block_size = [layer.mask for layer in spec.layers], spec.sinks, devices.block_size
    return (
        devices.platform == "tpu"
        and (devices.kv_dtype == devices.dtype or devices.kv_dtype in LARGEST)
        and all(
            tpu.can_attend(
                num_kv // devices.num, dim, block_size, masks, sinks, devices.dtype, devices.kv_dtype
            )
            for _, num_kv, dim, *_ in spec.all_heads
        )
    )


def _experts(spec: ModelSpec, devices: Devices) -> ExpertKernels:
    """Likewise, for the experts that tokens choose."""
    if devices.platform == "gpu" and gpu_experts.can_fuse(spec.activation, devices.dtype):
        choose = gpu_routing.choose if devices.num == 1 else experts.choose
        return ExpertKernels(choose, gpu_experts.fused_moe)
    if devices.platform == "tpu" and devices.dtype == jnp.bfloat16:
        return ExpertKernels(experts.choose, tpu_experts.fused_moe)
    if devices.platform != "cpu" and any(layer.experts for layer in spec.layers):
        kind = f"{spec.activation} in {devices.dtype}"
        log.warning("no kernel for experts with %s: a slower one is used", kind)
    return ExpertKernels(experts.choose, experts.dense)


def _adapters(spec: ModelSpec, devices: Devices) -> AdapterKernels:
    """The kernel makes of gates and ups what that of experts does. Over several devices it is not split."""
    fits = gpu_experts.can_fuse(spec.activation, devices.dtype) and all(
        heads.dim % MIN_DOT == 0 for heads in spec.all_heads
    )
    is_one_gpu = devices.platform == "gpu" and devices.num == 1
    return gpu_adapters.KERNELS if is_one_gpu and fits else AdapterKernels(add_by_all)
