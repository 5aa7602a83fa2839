"""Which kernels a model gets."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.config import EngineConfig
from hex_llm.execution.kernel_choice import Devices, choose_kernels, page_shapes
from hex_llm.execution.memory import token_bytes
from hex_llm.execution.programs import put_blocks, take_blocks
from hex_llm.execution.weight_plan import FORMS
from hex_llm.kernels import experts, gpu, gpu_launch, reference, tpu
from hex_llm.kernels.attention import QuantizedPages
from hex_llm.kernels.tpu_pages import PairedPages
from hex_llm.models.adapters import add_by_all
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


@pytest.mark.parametrize("asked", ["int8", "fp8"])
def test_tpus_have_pages_of_8_bits(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    config, spec = EngineConfig(kv_cache_dtype=asked), model_spec(CONFIG)
    devices = Devices.of(config, "tpu", 1, BF16)
    kernels = choose_kernels(spec, devices)
    assert kernels.attention.attend is tpu.paged_attention
    shape = page_shapes(spec, devices, 5)[0]
    pages = kernels.empty_pages(shape, devices.kv_dtype)
    assert isinstance(pages, PairedPages)
    assert pages.shape == shape == (5, 32, 2, 2, 128)
    assert pages.words.shape[2] == pages.scales.shape[2] == 2, "what devices divide"
    # Of a block of 32 a head's scales are a row of 128, where they would be 64.
    each = [num * (2 * width + 16) for _, _, num, _, width in page_shapes(spec, devices, 5)]
    assert token_bytes(spec, devices) == sum(each)
    assert not caplog.text
    filled = pages.scales.at[3].set(7.0)
    moved = take_blocks([PairedPages(pages.words, filled, pages.dtype)], jnp.array([3, 0]))
    put: Any = put_blocks([pages], jnp.array([1, 0]), moved)
    assert (put[0].scales[1] == 7).all()
    assert not put[0].scales[2:].any()


def test_the_reference_attends_where_the_tpus_kernel_does_not(caplog: pytest.LogCaptureFixture) -> None:
    spec, devices = model_spec(CONFIG), TPU._replace(kv_dtype=np.dtype(np.int8))
    kernels = choose_kernels(spec, devices._replace(dtype=np.dtype(np.float32)))
    assert kernels.attention.attend is reference.paged_attention
    assert isinstance(kernels.empty_pages((5, 16, 2, 2, 64), devices.kv_dtype), QuantizedPages)
    assert "heads of 64 and 512 in float32 and pages in int8: a slower one is used" in caplog.text


def test_older_gpus_have_what_xla_makes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of T4 and before: Triton has no compiler for them."""
    monkeypatch.setattr(gpu_launch, "capability", lambda: 7.5)
    config = {
        **CONFIG,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
    }
    kernels = choose_kernels(model_spec(config), Devices.of(EngineConfig(), "gpu", 1, BF16))
    assert kernels.attention.attend is reference.paged_attention
    assert kernels.experts.run is experts.dense
    assert kernels.adapter_kernels.add is add_by_all
    assert kernels.can_multiply(FORMS["int8"], False), "expanded where it is multiplied"
    assert "no attention kernel" in caplog.text
