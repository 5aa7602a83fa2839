"""Every family against transformers in float32: logits and greedy tokens, on one and several devices."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hex_llm import LLM, SamplingParams
from hex_llm.engine.engine import Engine
from hex_llm.execution.batch import StepShape
from hex_llm.models import decoder
from hex_llm.models.families import model_spec
from hex_llm.models.params import abstract_weights, declared
from hex_llm.types import Request
from tests.engine.driving import drive
from tests.tiny import FAMILIES, Tiny, greedy

NUM_TOKENS = 64
NUM_COMPARED = 32
TOLERANCE = 1e-4
BY_NAME = {tiny.name: tiny for tiny in FAMILIES}
# Their parameters have the shapes and the division of the other's: only rope, masks or depth differ.
SPLIT_LIKE = {
    "llama3.1": "llama3",
    "llama-guard-3": "phi4-reasoning",
    "codellama": "llama3",
    "llama-linear": "llama3",
    "llama-dynamic-short": "llama3",
    "llama-dynamic-long": "llama3",
    "llama-dynamic-growing": "llama3",
    "gemma2-9b": "gemma2-2b",
    "mistral-v0.2": "llama3",
    "phi3-mini-128k-short": "phi3-mini-4k",
    "phi3-mini-128k-long": "phi3-mini-4k",
    "phi3-mini-128k-growing": "phi3-mini-4k",
    "phi3-medium-128k": "phi4-reasoning",
    "phi4": "phi3-medium-4k",
    "phi3-partial-rotary": "phi3-medium-4k",
    "qwen2-window": "qwen2.5-window-off",
    "qwen2.5-yarn": "qwen2.5-window-off",
    "llama4-scout-vision": "llama4-scout",
}
# They are divided as others are, though of other sizes.
SPLIT_SELDOM = [
    "llama2",
    "llama3.2-tied",
    "smollm2",
    "gemma-2b",
    "gemma-7b",
    "gemma2-27b",
    "mistral-v0.1",
    "mistral-v0.3-head-dim",
    "mixtral-8x22b",
    "qwen2-untied",
    "qwen3",
    "gemma3-27b-vision",
    "smollm3",
    "ministral3",
    "granite3",
    "glm4.5",
    "qwen3-moe",
    "gpt-oss-20b",
    "llama4-scout",  # see tests/parallel
]
# Each shows what the others do not; those left out, `make test-all` runs.
USUAL = {
    "llama2-gqa-odd-vocab",
    "llama3.1",
    "llama-dynamic-growing",
    "gemma2-2b",
    "mixtral-8x7b",
    "phi3-mini-128k-growing",
    "phi3-partial-rotary",
    "qwen2-window",
    "llama4-scout",
    "qwen3-moe",
    "gemma3-27b-vision",
    "gemma4-26b-a4b-vision",
    "smollm3",
    "ministral3",
    "granite3",
    "olmo2-gqa-biases",
    "gpt-oss-20b",
    "glm4.5",
}


def shards(tiny: Tiny) -> set[tuple[tuple[int, ...], tuple[str | None, ...]]]:
    """The shapes and logical axes of the parameters."""
    config = {**tiny.config().to_dict(), "architectures": [tiny.architecture]}
    params = declared(abstract_weights(model_spec(config).split_over(tiny.devices)))
    return {(param.shape, param.axes) for param in params}


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
    choices, states = [], []
    spec, lm_head = runner.spec, runner.weights.lm_head

    def listening(key: Any) -> Any:
        def run(*arguments: Any) -> Any:
            found = program(key)(*arguments)
            logits = found[0] if key.gives_logits else decoder.logits(spec, lm_head, found[0][:1])
            choices.append(np.asarray(logits[0]))
            states.append(found[2])
            return found

        return run if isinstance(key, StepShape) else program(key)

    runner.program = listening  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=NUM_COMPARED, ignore_eos=True)
    drive(engine, [Request("logits", prompt, params)])
    runner.program = program  # type: ignore[method-assign]
    hidden = runner.finish(np.asarray(states[0])[: len(prompt)], np.zeros(len(prompt), np.int32))
    prompt_logits = decoder.logits(spec, lm_head, hidden)
    return np.asarray(prompt_logits), np.stack(choices)


def check_logits(
    folder: Path,
    devices: int,
    prompt: list[int],
    prompt_logits: np.ndarray,
    decoded: np.ndarray,
    tolerance: float = TOLERANCE,
    **flags: Any,
) -> LLM:
    """Those of a prompt and of NUM_COMPARED choices after it are the judge's."""
    llm = LLM(
        model=folder,
        dtype="float32",
        max_model_len=256,
        num_blocks=128,
        skip_tokenizer_init=True,
        tensor_parallel_size=devices,
        **flags,
    )
    ours, chosen = run_with_logits(llm.engine, prompt)
    np.testing.assert_allclose(ours, prompt_logits, atol=tolerance, rtol=0)
    np.testing.assert_allclose(chosen, decoded[:NUM_COMPARED], atol=tolerance, rtol=0)
    return llm


def check(tiny: Tiny, folder: Path, device_counts: Iterable[int]) -> None:
    prompt_logits, decoded, tokens = judge(tiny, folder)
    assert len(set(tokens)) > 8, "the judge repeats itself: this test would prove little"
    prompt = tiny.prompt()
    for devices in device_counts:
        llm = check_logits(folder, devices, prompt, prompt_logits, decoded)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        out = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
        assert out[0].outputs[0].token_ids == tokens


@pytest.mark.parametrize(
    "tiny",
    [pytest.param(tiny, marks=[pytest.mark.slow] * (tiny.name not in USUAL)) for tiny in FAMILIES],
    ids=lambda tiny: tiny.name,
)
def test_family_equals_transformers(tiny: Tiny, tmp_path: Path) -> None:
    check(tiny, tmp_path, [1] if tiny.name in (*SPLIT_LIKE, *SPLIT_SELDOM) else [1, tiny.devices])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SPLIT_LIKE, *SPLIT_SELDOM])
def test_those_split_like_others_on_several_devices(name: str, tmp_path: Path) -> None:
    check(BY_NAME[name], tmp_path, [BY_NAME[name].devices])


@pytest.mark.parametrize(("name", "other"), SPLIT_LIKE.items())
def test_they_are_split_like_others(name: str, other: str) -> None:
    assert other not in SPLIT_LIKE
    assert shards(BY_NAME[name]) == shards(BY_NAME[other])
