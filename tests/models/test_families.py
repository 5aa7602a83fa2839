"""Every family against transformers in float32: logits and greedy tokens, on one and several devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from hex_llm import LLM, SamplingParams
from hex_llm.engine.batch import pack, unpack
from hex_llm.engine.engine import Engine
from hex_llm.engine.runner import split_by_head
from hex_llm.kernels import reference
from hex_llm.models import decoder
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


def run_with_logits(engine: Engine, prompt: list[int]) -> list[np.ndarray]:
    """Drives the engine's own plans through the model and keeps the logits of every token of every step."""
    runner = engine.runner
    attend = split_by_head(reference.paged_attention, runner.mesh)

    @partial(jax.jit, static_argnames="shape")
    def forward(weights: Any, pages: Any, packed: Any, shape: Any) -> Any:
        inputs = unpack(packed, shape)
        spec, batch = runner.spec, inputs.batch
        hidden, pages = decoder.forward(spec, weights, inputs.token_ids, inputs.spans, pages, batch, attend)
        return decoder.logits(spec, weights, hidden), pages

    params = SamplingParams(temperature=0, max_tokens=NUM_COMPARED, ignore_eos=True)
    sequence = engine.prepare("logits", prompt, params)
    engine.add(sequence)
    steps = []
    while sequence.finish_reason is None:
        plan, _ = engine.scheduler.schedule()
        shape = runner.paddings.shape(plan)
        packed = jax.numpy.asarray(pack(plan, shape, runner.block_size))
        logits, runner.pages = forward(runner.weights, runner.pages, packed, shape)
        steps.append(np.asarray(logits)[: len(plan.chunks[0].token_ids)])
        sequence.append(int(steps[-1][-1].argmax()))
    engine.scheduler.finish(sequence)
    return steps


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
        steps = run_with_logits(llm.engine, prompt)
        np.testing.assert_allclose(steps[0], prompt_logits, atol=TOLERANCE, rtol=0)
        ours = np.stack([step[-1] for step in steps])
        np.testing.assert_allclose(ours, decoded[:NUM_COMPARED], atol=TOLERANCE, rtol=0)
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        out = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
        assert out[0].outputs[0].token_ids == tokens
