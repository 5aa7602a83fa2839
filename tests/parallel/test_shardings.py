"""Tensor parallelism: what a compiled step exchanges between devices."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from hex_llm import LLM
from hex_llm.errors import ConfigError
from hex_llm.execution.batch import StepShape
from hex_llm.execution.programs import Logits
from hex_llm.models.spec import Heads, ModelSpec
from hex_llm.parallel.shardings import group_meshes
from tests.tiny import LLAMA4, MOE, Tiny

NUM_LAYERS = 4
CASES = [
    Tiny("llama", "LlamaForCausalLM", {"num_hidden_layers": NUM_LAYERS}),
    Tiny("odd-vocab", "LlamaForCausalLM", {"num_hidden_layers": NUM_LAYERS, "vocab_size": 131}),
    Tiny("gemma2", "Gemma2ForCausalLM", {"num_hidden_layers": NUM_LAYERS, "head_dim": 16}),
    Tiny("mixtral", "MixtralForCausalLM", {**MOE, "num_hidden_layers": NUM_LAYERS}),
    Tiny("llama4", "Llama4ForCausalLM", LLAMA4),
]


@pytest.mark.parametrize(
    "tiny",
    [
        pytest.param(tiny, marks=[pytest.mark.slow] * (tiny.name not in ("odd-vocab", "llama4")))
        for tiny in CASES
    ],
    ids=lambda tiny: tiny.name,
)
def test_two_sums_a_layer_and_no_weight_moves(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny.config()
    config.architectures = [tiny.architecture]
    config.save_pretrained(tmp_path)
    flags = {"max_model_len": 64, "num_blocks": 16, "skip_tokenizer_init": True}
    llm = LLM(model=tmp_path, load_format="dummy", tensor_parallel_size=4, **flags)
    for shape in (StepShape(8, 8, 0), StepShape(64, 32, 8)):
        runner = llm.engine.stepper.runner
        program = runner.program(shape).as_text() + runner.program(Logits(8)).as_text()
        sums = len(re.findall(r" all-reduce(?:-start)?\(", program))
        # Attention and feed-forward of each layer, and the embedding where the vocabulary is split.
        embedding = llm.engine.spec.vocab_size % 4 == 0
        assert sums == 2 * NUM_LAYERS + embedding
        for size in re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)", program):
            elements = 1
            for n in size.split(","):
                elements *= int(n or 1)
            assert elements <= 4 * shape.num_rows, f"{size}: more than the likeliest tokens is exchanged"


def spec(**changes: int) -> ModelSpec:
    from hex_llm.models.families import model_spec

    values = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 96}
    config = {"vocab_size": 10, "num_hidden_layers": 1, "max_position_embeddings": 8, **values, **changes}
    return model_spec({"architectures": ["LlamaForCausalLM"], **config})


@pytest.mark.parametrize(("devices", "held", "repeat"), [(1, 2, 1), (2, 2, 1), (4, 4, 2), (8, 8, 4)])
def test_every_device_holds_a_kv_head(devices: int, held: int, repeat: int) -> None:
    split = spec().split_over(devices)
    assert (split.num_kv_heads, split.kv_repeat) == (held, repeat)


def test_layers_with_heads_of_their_own_are_divided_for_themselves() -> None:
    whole = replace(spec(), layers=(*spec().layers, replace(spec().layers[0], heads=Heads(6, 1, 32))))
    split = whole.split_over(4)
    assert split.heads == Heads(8, 4, 8, kv_repeat=2)
    assert split.layers[1].heads == Heads(8, 4, 32, kv_repeat=4, num_stored=6)
    with pytest.raises(ConfigError, match="over 1, 2, 4, 6 devices"):
        whole.split_over(8)


class Chip:
    """One of a v5e slice, as JAX describes it to who lays a mesh through them."""

    platform, device_kind, process_index, core_on_chip = "tpu", "TPU v5 lite", 0, 0

    def __init__(self, x: int, y: int) -> None:
        self.coords = (x, y, 0)


@pytest.mark.parametrize(("width", "height", "size"), [(2, 2, 1), (2, 4, 2), (2, 4, 4), (4, 4, 4), (4, 4, 8)])
def test_groups_of_chips_are_rectangles(width: int, height: int, size: int) -> None:
    """JAX lays no mesh through others, and chips are together with their neighbours."""
    chips: Any = [Chip(x, y) for y in range(height) for x in range(width)]
    meshes = group_meshes(size, len(chips) // size, chips)
    for mesh in meshes:
        xs, ys = ({chip.coords[axis] for chip in mesh.devices.flat} for axis in range(2))
        assert (max(xs) - min(xs) + 1) * (max(ys) - min(ys) + 1) == mesh.size == size
    assert {chip for mesh in meshes for chip in mesh.devices.flat} == set(chips)


def test_more_groups_than_there_are_devices_for() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=32: only .* are available"):
        group_meshes(8, 4, jax.devices())
