"""Adapters of every kind and family, alone and mixed, against PEFT on transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hex_llm.engine.engine import Engine
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import AdapterRef, Request
from tests.adapted import MAX_RANK, Judge
from tests.engine.driving import drive, make_engine, tokens
from tests.tiny import FAMILIES, Tiny

NUM_OUT = 32
NAMES = ("a", "b", "c", "d")
FAST = ("llama3.2-tied", "gemma2-2b", "phi3-mini-4k", "llama4-scout")


def adapted_engine(folder: Path, **flags: Any) -> Engine:
    """With few shapes to compile."""
    options = {"enable_lora": True, "max_lora_rank": MAX_RANK, "max_loras": 4, "allowed_lora_sources": "/"}
    shapes = {"decode_seqs_padding": 8, "max_num_batched_tokens": 128, "prefill_len_padding": 128}
    return make_engine(folder, **{**options, **shapes, **flags})


def adapted_request(name: str, prompt: list[int], folder: Path | None, **params: Any) -> Request:
    ref = None if folder is None else AdapterRef(folder.name, str(folder))
    greedy = {"temperature": 0, "max_tokens": NUM_OUT, "ignore_eos": True}
    return Request(name, prompt, SamplingParams(**{**greedy, **params}), adapter=ref)


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


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    "tiny",
    [t if t.name in FAST else pytest.param(t, marks=pytest.mark.slow) for t in FAMILIES],
    ids=lambda t: t.name,
)
def test_every_family_says_what_peft_says(tiny: Tiny, devices: int, tmp_path: Path) -> None:
    check(tiny, tmp_path, min(devices, tiny.devices))
