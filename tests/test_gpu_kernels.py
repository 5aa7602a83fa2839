"""Kernels for GPUs are compiled to their machine code here, and need no more than such a GPU has."""

from __future__ import annotations

import pytest

from hex_llm.execution.batch import StepShape
from tools.gpu_kernels import kernels_of_step, needs_of
from tools.gpu_models import GPUS, MODELS, STEPS

L4, H100 = GPUS["L4"], GPUS["H100"]
FEW = ("llama-8b", [StepShape(1, 1, 0), StepShape(512, 64, 4)])


@pytest.mark.parametrize(
    ("name", "steps"), [FEW, *(pytest.param(name, STEPS, marks=pytest.mark.slow) for name in MODELS)]
)
def test_steps_fit_into_small_gpus(name: str, steps: list[StepShape]) -> None:
    found = {kernel for shape in steps for kernel in kernels_of_step(MODELS[name], shape, L4)}
    assert len(found) >= 2 * len(steps)
    for kernel in found:
        assert needs_of(kernel, L4.capability).shared <= L4.most_shared, kernel.name


def test_what_was_measured_with_needs_a_large_gpu() -> None:
    """Or there would be no need for others."""
    [step] = FEW[1][:1]
    found = kernels_of_step(MODELS["llama-8b"], step, H100)
    shared = [needs_of(kernel, L4.capability).shared for kernel in found if "attend" in kernel.name]
    assert max(shared) > L4.most_shared
