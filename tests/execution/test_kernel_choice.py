"""Which kernels a model gets."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.execution.kernel_choice import Devices, choose_kernels, page_shapes
from hex_llm.kernels import gpu, reference
from hex_llm.models.families import model_spec
from tests.tiny import BASE, GEMMA4

BF16 = np.dtype(jnp.bfloat16)
GPU, TPU = (Devices(platform, 1, 16, BF16, BF16) for platform in ("gpu", "tpu"))
HEADS = {"head_dim": 64, "global_head_dim": 512}
CONFIG = {"architectures": ["Gemma4ForCausalLM"], **BASE, **GEMMA4, **HEADS}


def test_layers_whose_heads_no_kernel_is_for_have_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    used: list[str] = []
    for module in (gpu, reference):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "paged_attention", lambda *_, name=name: used.append(name))
    choose_kernels.cache_clear()
    attend: Any = choose_kernels(model_spec(CONFIG), GPU).attention.attend
    for head_dim in (64, 512):
        attend(jnp.zeros((1, 2, 2, head_dim), BF16), *[None] * 5)
    assert used == ["gpu", "reference"]
    assert "heads of 512 in bfloat16" in caplog.text
    choose_kernels.cache_clear()


def test_pages_have_their_layers_heads() -> None:
    spec = model_spec(CONFIG)
    assert page_shapes(spec, GPU, 5)[:2] == [(5, 16, 2, 2, 64), (5, 16, 1, 2, 512)]
    assert page_shapes(spec, TPU, 5)[:2] == [(5, 16, 2, 2, 128), (5, 16, 1, 2, 512)], "whole lanes"
