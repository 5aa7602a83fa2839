"""Programs lowered for GPUs where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh


def lowered(function: Callable[..., Any], *arguments: Any) -> jax.stages.Lowered:
    """Within gpu_launch.made_for. Newer versions of jax want to know for which GPU."""
    gpu = AbstractDevice("NVIDIA H200", None, "gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
