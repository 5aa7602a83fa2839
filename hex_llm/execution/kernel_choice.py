"""Which kernels, form of weights and width of pages a model gets on its devices: the one place that knows."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from hex_llm.kernels import cpu, cpu_experts, experts, gpu, gpu_experts, reference, tpu, tpu_experts
from hex_llm.kernels.attention import PagedAttention
from hex_llm.kernels.experts import RoutedExperts
from hex_llm.models.spec import ModelSpec

log = logging.getLogger(__name__)


class Kernels(NamedTuple):
    attend: PagedAttention
    fused_moe: RoutedExperts
    panel_width: int | None  # of weights in panels, for the CPU's own kernels; None: they stay as loaded


class Devices(NamedTuple):
    """What a choice depends on besides the model."""

    platform: str
    num: int
    block_size: int
    dtype: np.dtype[Any]


def choose_kernels(spec: ModelSpec, devices: Devices) -> Kernels:
    panel_width = _panel_width(spec, devices)
    if panel_width is not None:
        return Kernels(cpu.paged_attention, cpu_experts.fused_moe, panel_width)
    return Kernels(_attention(spec, devices), _experts(spec, devices), None)


def page_width(spec: ModelSpec, devices: Devices) -> int:
    """Numbers of a key in its page."""
    return tpu.padded_head_dim(spec.head_dim) if _attends_on_tpu(spec, devices) else spec.head_dim


def _panel_width(spec: ModelSpec, devices: Devices) -> int | None:
    if devices.num > 1 or devices.platform != "cpu" or devices.dtype != np.float32:
        return None
    width = cpu.panel_width()
    return width if width is not None and spec.head_dim % (width // cpu.PANEL_VECTORS) == 0 else None


def _attention(spec: ModelSpec, devices: Devices) -> PagedAttention:
    """The kernel for these devices, or the reference where there is none for them or for this model."""
    if devices.platform == "gpu" and gpu.can_attend(spec.group_size, spec.head_dim, devices.dtype):
        return gpu.paged_attention
    if _attends_on_tpu(spec, devices):
        return tpu.paged_attention
    if devices.platform != "cpu":
        heads = f"heads of {spec.head_dim} in {devices.dtype}"
        log.warning("no attention kernel for %s: a slower one is used", heads)
    return reference.paged_attention


def _attends_on_tpu(spec: ModelSpec, devices: Devices) -> bool:
    num_kv_heads, masks = spec.num_kv_heads // devices.num, [layer.mask for layer in spec.layers]
    return devices.platform == "tpu" and tpu.can_attend(
        num_kv_heads, spec.head_dim, devices.block_size, masks, devices.dtype
    )


def _experts(spec: ModelSpec, devices: Devices) -> RoutedExperts:
    """Likewise, for the experts that tokens choose."""
    if devices.platform == "gpu" and gpu_experts.can_fuse(spec.activation, devices.dtype):
        return gpu_experts.fused_moe
    if devices.platform == "tpu" and devices.dtype == jnp.bfloat16:
        return tpu_experts.fused_moe
    if devices.platform != "cpu" and any(layer.experts for layer in spec.layers):
        kind = f"{spec.activation} in {devices.dtype}"
        log.warning("no kernel for experts with %s: a slower one is used", kind)
    return experts.dense
