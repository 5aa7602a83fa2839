"""The embedded default, from the GGUF file: the tokens of transformers from the same file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hex_llm import LLM, SamplingParams
from tests.tiny import default_model, greedy_tokens
from tools.prompts import PROMPTS

NUM_TOKENS = 32
NUM_FAST_PROMPTS = 8
NUM_SLOW_TOKENS = 64


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=512, num_blocks=512, max_decode_seqs=32)


@pytest.fixture(scope="module")
def judge() -> Any:
    return default_model()[1]


def generate(llm: LLM, prompts: list[str], num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and output ids, all at once."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(out.prompt_token_ids, out.outputs[0].token_ids) for out in outputs]


@pytest.mark.slow
def test_capital_of_france(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [out] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    assert out.outputs[0].text == "The capital of France is Paris."
    assert out.outputs[0].finish_reason == "stop"


@pytest.mark.slow
def test_every_token_is_the_judges_choice(llm: LLM, judge: Any) -> None:
    """Each of our tokens is transformers' likeliest after those before it: its greedy search is ours."""
    for prompt, output in generate(llm, PROMPTS[:NUM_FAST_PROMPTS], NUM_TOKENS):
        assert len(output) == NUM_TOKENS
        with torch.no_grad():
            logits = judge(torch.tensor([prompt + output])).logits[0]
        choices = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output == choices


@pytest.mark.slow
def test_generate_gives_the_same_tokens(llm: LLM, judge: Any) -> None:
    for prompt, output in generate(llm, PROMPTS, NUM_SLOW_TOKENS):
        assert output == greedy_tokens(judge, prompt, NUM_SLOW_TOKENS)
