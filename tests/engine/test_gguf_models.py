"""GGUF files of every architecture, end to end: the tokens of the model that the file was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Q

from hex_llm import LLM, SamplingParams
from tests.models.test_families import NUM_COMPARED, TOLERANCE, check_logits
from tests.models.test_quantized import IN_WHOLE_NUMBERS
from tests.tiny import (
    GLM,
    GPT_OSS,
    LLAMA4,
    MINISTRAL3,
    MOE,
    MQA,
    SCOUT_ROPE,
    Tiny,
    greedy,
    greedy_tokens,
)
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


# Of the newer architectures: chunks and the sharpening of queries of Llama 4 are not in the file, but fixed.
NEWER = [
    Tiny("gpt-oss", "GptOssForCausalLM", {**GPT_OSS, "intermediate_size": 64}, prompt_len=50),
    Tiny("glm4moe", "Glm4MoeForCausalLM", {**GLM, "use_qk_norm": True, "attention_bias": True}),
    Tiny(
        "glm4moe-odd",
        "Glm4MoeForCausalLM",
        {**GLM, **MQA, "first_k_dense_replace": 2, "norm_topk_prob": False, "n_shared_experts": 2},
    ),
    Tiny("minimax-m2", "MiniMaxM2ForCausalLM", {**MOE, "head_dim": 16, "rotary_dim": 8}),
    Tiny(
        "llama4",
        "Llama4ForCausalLM",
        {**LLAMA4, **SCOUT_ROPE, "attention_chunk_size": 8192, "floor_scale": 8192},
        prompt_len=40,
    ),
    Tiny(
        "llama4-dense-between",
        "Llama4ForCausalLM",
        {**LLAMA4, **MQA, "attention_chunk_size": 8192, "floor_scale": 8192, "interleave_moe_layer_step": 2},
    ),
    Tiny("mistral3", "Ministral3ForCausalLM", MINISTRAL3, prompt_len=50),
]


@pytest.mark.parametrize(
    ("tiny", "devices"),
    [
        pytest.param(
            tiny,
            devices,
            marks=[pytest.mark.slow] * ((tiny.name, devices) != ("gpt-oss", 1)),
            id=f"{tiny.name}-{devices}",
        )
        for tiny in NEWER
        for devices in (1, 4)
    ],
)
def test_newer_architectures(tiny: Tiny, devices: int, tmp_path: Path) -> None:
    """Logits and tokens; of gpt-oss with experts in MXFP4, which one CPU multiplies as whole numbers."""
    model = tiny.build()
    ropes, is_gpt_oss = model.config.rope_parameters, tiny.name == "gpt-oss"
    extra = {}
    if ropes["rope_type"] == "llama3":
        inv_freq = model.model.rotary_emb.inv_freq.double()
        steps = torch.arange(len(inv_freq)) / len(inv_freq)
        extra["rope_freqs.weight"] = ropes["rope_theta"] ** -steps / inv_freq
    if is_gpt_oss:
        for name, weight in model.named_parameters():
            if ".experts." in name and weight.ndim == 3:
                blocks = gguf.quants.quantize(weight.detach().mT.contiguous().numpy(), Q.MXFP4)
                weight.data = torch.tensor(gguf.quants.dequantize(blocks, Q.MXFP4)).mT.contiguous()
    path = convert(model, tmp_path / "model.gguf", experts=Q.MXFP4 if is_gpt_oss else None, extra=extra)
    prompt = tiny.prompt()
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].numpy()
    theirs = greedy(model, prompt, NUM_COMPARED, output_logits=True, return_dict_in_generate=True)
    tokens = theirs.sequences[0, len(prompt) :].tolist()
    assert len(set(tokens)) > 6, "the judge repeats itself: this test would prove little"
    params = SamplingParams(temperature=0, max_tokens=NUM_COMPARED, ignore_eos=True)
    tolerance = IN_WHOLE_NUMBERS if is_gpt_oss and devices == 1 else TOLERANCE
    llm = check_logits(path, devices, prompt, logits, torch.cat(theirs.logits).numpy(), tolerance)
    [out] = llm.generate(prompt_token_ids=[prompt], sampling_params=params, use_tqdm=False)
    assert out.outputs[0].token_ids == tokens
