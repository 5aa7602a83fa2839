"""Every family against transformers in float32: logits and greedy tokens, on one and several devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hex_llm import LLM, SamplingParams
from hex_llm.engine.engine import Engine
from hex_llm.execution.batch import StepShape
from hex_llm.models import decoder
from hex_llm.types import Request
from tests.engine.driving import drive
from tests.tiny import FAMILIES, Tiny, greedy

NUM_TOKENS = 64
NUM_COMPARED = 32
TOLERANCE = 1e-4


def judge(tiny: Tiny, folder: Path) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Logits of the prompt, logits of the decoded positions, greedy tokens: all from transformers."""
    model = tiny.save(folder)
    prompt = tiny.prompt()
    with torch.no_grad():
        prompt_logits = model(torch.tensor([prompt])).logits[0].numpy()
    out = greedy(model, prompt, NUM_TOKENS, output_logits=True, return_dict_in_generate=True)
    decoded = torch.cat(out.logits).numpy()
    return prompt_logits, decoded, out.sequences[0, tiny.prompt_len :].tolist()


def run_with_logits(engine: Engine, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Serves one request and listens in: the logits of every token of its prompt, and of every choice."""
    runner, program = engine.stepper.runner, engine.stepper.runner.program
    choices, hidden = [], []

    def listening(key: Any) -> Any:
        def run(*arguments: Any) -> Any:
            found = program(key)(*arguments)
            choices.append(np.asarray(found[0][0]))
            hidden.append(found[2])
            return found

        return run if isinstance(key, StepShape) else program(key)

    runner.program = listening  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=NUM_COMPARED, ignore_eos=True)
    drive(engine, [Request("logits", prompt, params)])
    runner.program = program  # type: ignore[method-assign]
    prompt_logits = decoder.logits(runner.spec, runner.weights, hidden[0][: len(prompt)])
    return np.asarray(prompt_logits), np.stack(choices)


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda t: t.name)
def test_family_equals_transformers(tiny: Tiny, tmp_path: Path) -> None:
    prompt_logits, decoded, tokens = judge(tiny, tmp_path)
    assert len(set(tokens)) > 8, "the judge repeats itself: this test would prove little"
    prompt = tiny.prompt()
    for devices in (1, tiny.devices):
        llm = LLM(
            model=tmp_path,
            dtype="float32",
            max_model_len=256,
            num_blocks=128,
            skip_tokenizer_init=True,
            tensor_parallel_size=devices,
        )
        ours, chosen = run_with_logits(llm.engine, prompt)
        np.testing.assert_allclose(ours, prompt_logits, atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(chosen, decoded[:NUM_COMPARED], atol=TOLERANCE, rtol=0)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        out = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
        assert out[0].outputs[0].token_ids == tokens
