"""Adapters of every kind and family, alone and mixed, against PEFT on transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapted import NAMES, NUM_OUT, Judge, adapted_engine, adapted_request
from tests.engine.driving import LLAMA, drive, tokens
from tests.tiny import FAMILIES, Tiny


def check(tiny: Tiny, tmp_path: Path, devices: int, **flags: Any) -> None:
    """Each alone, then eight rows with four adapters and none."""
    judge = Judge(tiny.save(tmp_path / "model"))
    folders = {name: judge.add(name, tmp_path, i) for i, name in enumerate(NAMES)}
    engine = adapted_engine(tmp_path / "model", tensor_parallel_size=devices, **flags)
    asked = [(name, tiny.prompt(i)) for i, name in enumerate((*NAMES, None, "a", "b", None))]
    expected = [judge.tokens(name, prompt, NUM_OUT) for name, prompt in asked]
    requests = [
        adapted_request(str(i), prompt, folders.get(name or "")) for i, (name, prompt) in enumerate(asked)
    ]
    alone = [tokens(drive(engine, [one])[one.request_id, 0]) for one in requests[:4]]
    assert alone == expected[:4]
    told = drive(engine, requests)
    assert [tokens(told[str(i), 0]) for i in range(len(asked))] == expected
    assert len({tuple(one) for one in expected[:4]}) == 4, "the adapters say the same"


FAST = {"llama3.2-tied": 4, "phi3-mini-4k": 1, "gemma2-2b": 1}  # over so many devices
CASES = [
    pytest.param(tiny, devices, marks=[] if FAST.get(tiny.name) == devices else pytest.mark.slow)
    for tiny in FAMILIES
    for devices in (1, tiny.devices)
]


@pytest.mark.parametrize(
    ("tiny", "devices"), CASES, ids=lambda value: value.name if isinstance(value, Tiny) else f"{value}"
)
def test_every_family_says_what_peft_says(tiny: Tiny, devices: int, tmp_path: Path) -> None:
    check(tiny, tmp_path, devices)


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_over_a_quantized_base(devices: int, tmp_path: Path) -> None:
    """The judge has the weights that the codes stand for."""
    model = LLAMA.save(tmp_path / "model")
    round_weights(model)
    judge = Judge(model)
    folders = {name: judge.add(name, tmp_path, i) for i, name in enumerate(NAMES)}
    engine = adapted_engine(tmp_path / "model", tensor_parallel_size=devices, quantization="int8")
    asked = [(name, LLAMA.prompt(i)) for i, name in enumerate((*NAMES, None))]
    told = drive(
        engine, [adapted_request(f"{name}", prompt, folders.get(name or "")) for name, prompt in asked]
    )
    for name, prompt in asked:
        assert tokens(told[f"{name}", 0]) == judge.tokens(name, prompt, NUM_OUT), name


def round_weights(model: Any) -> None:
    """As --quantization=int8 does: to 127 steps on each side of zero, for the inputs of a group."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                groups = weight.reshape(len(weight), -1, math.gcd(128, weight.shape[1]))
                scales = groups.abs().amax(-1, keepdim=True) / 127
                weight.copy_((torch.round(groups / scales) * scales).reshape(weight.shape))
