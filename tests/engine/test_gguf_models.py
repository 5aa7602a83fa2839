"""GGUF files of every architecture, end to end: the tokens of the model that the file was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hex_llm import LLM, SamplingParams
from tests.tiny import greedy_tokens
from tests.weights.gguf_files import convert, random_model

NUM_TOKENS = 24
PROMPTS = [[5, 17, 80, 3, 44, 61, 9, 9, 30, 71, 12, 50, 7, 88], [11, 2, 95], [70] * 5 + [33, 8, 64]]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("LlamaForCausalLM", {}),
    ("MistralForCausalLM", {"sliding_window": None}),
    ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("GemmaForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}),
    ("Gemma2ForCausalLM", {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 8}),
    ("Phi3ForCausalLM", {"tie_word_embeddings": False}),
]


LIKE_OTHERS = {architecture for architecture, _ in CASES} - {"LlamaForCausalLM", "MixtralForCausalLM"}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in LIKE_OTHERS), id=case[0]) for case in CASES],
)
def test_tokens_of_the_model_before_conversion(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(architecture, **changes).float().eval()
    model.set_attn_implementation("eager")  # the only one that caps scores
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                quiet = "embed" in name and model.config.tie_word_embeddings
                weight.copy_(torch.randn_like(weight) * (0.02 if quiet else 0.3))
    window = getattr(model.config, "sliding_window", None)
    arch = model.config.model_type
    keys = {f"{arch}.attention.sliding_window": window} if arch == "gemma2" else {}
    path = convert(model, tmp_path / "model.gguf", keys=keys)
    theirs = [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert len(set().union(*theirs)) > 6, "the judge repeats itself: this test would prove little"
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for devices in (1, 2):
        llm = LLM(
            model=path,
            dtype="float32",
            num_blocks=16,
            skip_tokenizer_init=True,
            tensor_parallel_size=devices,
        )
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False)
        assert [out.outputs[0].token_ids for out in outputs] == theirs
