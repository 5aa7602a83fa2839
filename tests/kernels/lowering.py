"""Kernels for GPUs where there is none: lowered to Triton's own language, as far as that goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from hex_llm.kernels import gpu_launch


def lowered_for_gpus(function: Callable[..., Any], *arguments: Any) -> str:
    """The program as text. Newer versions of jax want to know for which GPU."""
    gpu = AbstractDevice("NVIDIA H200", None, "gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)), gpu_launch.made_for(gpu_launch.HOPPER):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
