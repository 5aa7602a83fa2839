"""Programs lowered for GPUs where there is none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def for_a_gpu() -> AbstractContextManager[object]:
    """Newer versions of jax want to know for which GPU kernels are lowered."""
    gpu = AbstractDevice("NVIDIA H200", None, "gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu))


def lowered(function: Callable[..., Any], *arguments: Any) -> jax.stages.Lowered:
    """Within gpu_launch.made_for."""
    with for_a_gpu():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
