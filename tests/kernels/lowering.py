"""Kernels for GPUs where there is none: lowered to Triton's own language, as far as that goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hex_llm.kernels import gpu_launch
from tools.gpu_lowering import lowered


def lowered_for_gpus(function: Callable[..., Any], *arguments: Any) -> str:
    """The program as text."""
    with gpu_launch.made_for(gpu_launch.HOPPER):
        return lowered(function, *arguments).as_text()
