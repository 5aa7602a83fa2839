"""Which kernels, form of weights and width of pages a model gets on its devices: the one place that knows."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.config import EngineConfig
from hex_llm.execution.weight_layouts import for_cpu, for_gpus, for_tpus
from hex_llm.kernels import (
    cpu,
    cpu_experts,
    experts,
    gpu,
    gpu_adapters,
    gpu_experts,
    gpu_launch,
    gpu_quantized,
    gpu_routing,
    reference,
    tpu,
    tpu_experts,
    tpu_quantized_experts,
)
from hex_llm.kernels.adapters import AdapterKernels
from hex_llm.kernels.attention import LARGEST, AttentionKernels, Batch, KVPages, Options, empty_pages
from hex_llm.kernels.codes import E2M1_GROUP
from hex_llm.kernels.cpu_quantized import block_of
from hex_llm.kernels.experts import ExpertKernels
from hex_llm.kernels.gpu_launch import MIN_CAPABILITY, MIN_DOT
from hex_llm.models.adapters import add_by_all
from hex_llm.models.params import Weights
from hex_llm.models.spec import Heads, ModelSpec
from hex_llm.weights.grouped import Form

log = logging.getLogger(__name__)

FLOAT8 = np.dtype(jnp.float8_e4m3fn)
DTYPES: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
KV_DTYPES = DTYPES | {"fp8": FLOAT8, "fp8_e4m3": FLOAT8, "int8": np.int8}
OLDER_GPU = "older gpu"  # which XLA alone has a compiler for
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
        if platform == "gpu" and gpu_launch.capability() < MIN_CAPABILITY:
            platform = OLDER_GPU
        kv_dtype = dtype if asked == "auto" else np.dtype(KV_DTYPES[asked])
        return cls(platform, num, config.block_size, dtype, kv_dtype)


@cache
def choose_kernels(spec: ModelSpec, devices: Devices) -> Kernels:
    panel_width = _panel_width(spec, devices)
    if panel_width is not None:
        in_panels = partial(for_cpu, width=panel_width)
        is_plain = devices.kv_dtype == np.float32
        attention = AttentionKernels(cpu.paged_attention if is_plain else reference.paged_attention)
        max_single = sys.maxsize if is_plain else MAX_SINGLE
        routed = ExpertKernels(experts.choose, cpu_experts.fused_moe)
        return Kernels(attention, routed, _whole, max_single, in_panels, _lies_in_panels)
    width, pages = _whole, empty_pages
    if _attends_on_tpu(spec, devices):
        width, pages = tpu.padded_head_dim, tpu.empty_pages
    attention, routed = _attention(spec, devices), _experts(spec, devices)
    can_multiply = partial(_can_multiply, spec=spec, devices=devices)
    lay_out = _lay_out(spec, devices)
    adapters = _adapters(spec, devices)
    return Kernels(attention, routed, width, MAX_SINGLE, lay_out, can_multiply, adapters, pages)


def _whole(head_dim: int) -> int:
    return head_dim


def _lay_out(spec: ModelSpec, devices: Devices) -> Callable[[Weights], Weights]:
    """What several CPUs, and those without our own kernels, multiply lies as it was loaded."""
    if devices.platform == "gpu":
        can_gate = gpu_experts.can_fuse(spec.activation, devices.dtype)
        return partial(for_gpus, is_alone=devices.num == 1, can_gate=can_gate)
    return for_tpus if devices.platform == "tpu" else lambda weights: weights


def page_shapes(spec: ModelSpec, devices: Devices, num_blocks: int) -> list[tuple[int, ...]]:
    """Of each layer's pages."""
    width, heads = choose_kernels(spec, devices).page_width, map(spec.heads_of, spec.layers)
    return [(num_blocks, devices.block_size, one.num_kv, 2, width(one.dim)) for one in heads]


def _can_multiply(form: Form, routed: bool, spec: ModelSpec, devices: Devices) -> bool:
    """Others expand what they multiply; GPUs and TPUs would be slower for it than with floats."""
    if devices.platform == "tpu":
        fits = not routed or tpu_quantized_experts.can_multiply(form.group)
        return devices.dtype == jnp.bfloat16 and fits
    if devices.platform != "gpu":
        return True
    if not form.group and not routed:
        return devices.dtype != np.float32
    fits = not routed or gpu_experts.can_fuse(spec.activation, devices.dtype)
    # Of experts, weight_layouts makes groups whole again that lie on two devices.
    group = E2M1_GROUP if routed and form.is_e2m1 else form.group
    return fits and gpu_quantized.can_multiply(form.bits, group, devices.dtype, form.is_float)


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
