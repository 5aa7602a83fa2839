"""Adapters of every kind and family, alone and mixed, against PEFT on transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.adapted import NAMES, NUM_OUT, Judge, adapted_engine, adapted_request
from tests.engine.driving import drive, tokens
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


FAST = {"phi3-mini-4k": 4}  # over so many devices
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


@pytest.mark.slow
def test_adapters_go_along_from_prefill_to_decode(tmp_path: Path) -> None:
    check(FAMILIES[0], tmp_path, 1, disagg_topo="1,2")


# Wide enough for the groups that CPUs multiply.
WIDE = Tiny("wide", "LlamaForCausalLM", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32})


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_over_a_quantized_base(devices: int, tmp_path: Path) -> None:
    """The judge has the weights that the codes stand for. One CPU rounds what they are multiplied with, too:
    there log-probabilities are compared, not tokens."""
    model = WIDE.save(tmp_path / "model")
    round_weights(model, devices)
    judge = Judge(model)
    folders = {name: judge.add(name, tmp_path, i) for i, name in enumerate(NAMES)}
    engine = adapted_engine(tmp_path / "model", tensor_parallel_size=devices, quantization="int8")
    asked = [(name, WIDE.prompt(i)) for i, name in enumerate((*NAMES, None))]
    told = drive(
        engine,
        [
            adapted_request(f"{name}", prompt, folders.get(name or ""), prompt_logprobs=1)
            for name, prompt in asked
        ],
    )
    for name, prompt in asked:
        got = told[f"{name}", 0]
        expected = judge.logprobs(name, prompt)
        np.testing.assert_allclose([one.logprob for one in got[0].prompt_logprobs], expected, atol=0.01)
        if devices > 1:
            assert tokens(got) == judge.tokens(name, prompt, NUM_OUT), name


def round_weights(model: Any, devices: int) -> None:
    """As --quantization=int8 does: to 127 steps on each side of zero, in groups of one device and head."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                last = {"o_proj": model.config.head_dim, "down_proj": weight.shape[1] // devices}
                group = math.gcd(128, last.get(name.split(".")[-2], weight.shape[1]))
                groups = weight.reshape(len(weight), -1, group)
                scales = groups.abs().amax(-1, keepdim=True) / 127
                weight.copy_((torch.round(groups / scales) * scales).reshape(weight.shape))
