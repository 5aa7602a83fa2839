"""Embeddings against transformers' hidden states: alone, in batches and chunks, with and without a cached
prefix, on one device and on several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hex_llm import LLM, SamplingParams
from hex_llm.errors import ConfigError, InvalidRequest
from hex_llm.frontend.pooling import pooling_params
from hex_llm.types import Pooling, Request
from tests.engine.driving import drive
from tests.engine.equality import forced_preemptions
from tests.tiny import FAMILIES, LLAMA3, Tiny

TINY = Tiny("llama", "LlamaForCausalLM", LLAMA3, prompt_len=60)
PROMPTS = [TINY.prompt(seed)[: 1 + 7 * seed] for seed in range(8)]
PROMPTS.append(PROMPTS[-1][:40] + PROMPTS[3])  # begins like another
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 96,
    "num_blocks": 64,
    "block_size": 8,
    "max_num_batched_tokens": 16,
    "skip_tokenizer_init": True,
}
POOLED = {
    "LAST": lambda hidden: hidden[-1],
    "MEAN": lambda hidden: hidden.mean(0),
    "CLS": lambda hidden: hidden[0],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    TINY.save(folder)
    return folder


@pytest.fixture(scope="module")
def hidden() -> list[np.ndarray[Any, Any]]:
    return hidden_of(TINY, PROMPTS)


def hidden_of(tiny: Tiny, prompts: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    model = tiny.build()
    with torch.no_grad():
        return [model.model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in prompts]


def config(kind: str, **more: Any) -> str:
    return json.dumps({"pooling_type": kind, **more})


def embed(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[float]]:
    outputs = llm.embed(prompt_token_ids=prompts, use_tqdm=False, **options)
    return [output.outputs.embedding for output in outputs]


def check(got: list[list[float]], expected: list[np.ndarray[Any, Any]]) -> None:
    """Hidden states lie around 1, so these are nearly relative."""
    for one, judged in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, judged, rtol=1e-5, atol=1e-5 * np.abs(judged).max())


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("LAST", 4),
        ("MEAN", 1),
        ("CLS", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("LAST", 1), ("MEAN", 4))),
    ],
)
def test_hidden_states(folder: Path, hidden: list[Any], kind: str, devices: int) -> None:
    llm = LLM(folder, **FLAGS, tensor_parallel_size=devices, pooler_config=config(kind, normalize=False))
    expected = [POOLED[kind](one) for one in hidden]
    check(embed(llm, PROMPTS), expected)
    check(embed(llm, PROMPTS), expected)  # with what is cached, if it may be
    check([embed(llm, [ids])[0] for ids in PROMPTS[:3]], expected[:3])
    assert (llm.engine.stepper.scheduler.num_prefix_hits > 0) == (kind == "LAST")
    [mixed] = llm.generate(prompt_token_ids=[PROMPTS[4]], sampling_params=SamplingParams(max_tokens=3))
    assert len(mixed.outputs[0].token_ids) == 3
    llm.engine.check()


@pytest.mark.parametrize(
    "name",
    [
        "gemma2-2b",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral-8x7b", "phi3-mini-128k-long")),
    ],
)
def test_families(name: str, tmp_path: Path) -> None:
    [tiny] = [one for one in FAMILIES if one.name == name]
    tiny.save(tmp_path)
    prompts = [tiny.prompt(seed)[seed:] for seed in range(3)]
    llm = LLM(tmp_path, **FLAGS, pooler_config=config("MEAN", normalize=False))
    check(embed(llm, prompts), [one.mean(0) for one in hidden_of(tiny, prompts)])


def test_a_model_without_a_head(tmp_path: Path, hidden: list[Any]) -> None:
    """As sentence-transformers saves it."""
    TINY.build().model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaModel"]
    check(
        embed(LLM(tmp_path, **FLAGS, pooler_config=config("MEAN", normalize=False)), PROMPTS),
        [one.mean(0) for one in hidden],
    )


def test_embedders_and_rerankers_of_qwen3(tmp_path: Path) -> None:
    [tiny] = [one for one in FAMILIES if one.name == "qwen3"]
    model = tiny.save(tmp_path)
    prompts = [tiny.prompt(seed)[seed:] for seed in range(3)]
    llm = LLM(tmp_path, **FLAGS)
    lasts = [one[-1] for one in hidden_of(tiny, prompts)]
    check(embed(llm, prompts), [one / np.linalg.norm(one) for one in lasts])
    params = pooling_params(Pooling("tokens", token_ids=(7, 9)))
    for ids, output in zip(
        prompts, llm.generate(prompt_token_ids=prompts, sampling_params=params), strict=True
    ):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[[7, 9]].numpy()
        np.testing.assert_allclose(np.frombuffer(output.pooled, np.float32), expected, rtol=1e-5, atol=1e-5)


def test_embeddings_and_texts_share_steps(folder: Path, hidden: list[Any]) -> None:
    """Generating requests beside them get what they get alone."""
    llm = LLM(folder, **FLAGS)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    alone = [
        one.outputs[0].token_ids for one in llm.generate(prompt_token_ids=PROMPTS, sampling_params=greedy)
    ]
    pooled = pooling_params(llm.engine.limits.pooling)
    both = llm.generate(
        prompt_token_ids=[ids for ids in PROMPTS for _ in range(2)],
        sampling_params=[greedy, pooled] * len(PROMPTS),
    )
    assert [one.outputs[0].token_ids for one in both[::2]] == alone
    check([np.frombuffer(one.pooled, np.float32).tolist() for one in both[1::2]], [one[-1] for one in hidden])
    assert not any(one.pooled for one in both[::2])


def test_a_preempted_mean_begins_anew(folder: Path, hidden: list[Any]) -> None:
    engine = LLM(folder, **FLAGS, pooler_config=config("MEAN", normalize=False)).engine
    params = pooling_params(engine.limits.pooling)
    requests = [Request(f"{i}", ids, params) for i, ids in enumerate(PROMPTS)]
    updates = drive(engine, requests, forced_preemptions(engine, 2))
    assert engine.stepper.scheduler.num_preemptions > 3
    pooled = [updates[request.request_id, 0][-1].pooled for request in requests]
    check([np.frombuffer(one, np.float32).tolist() for one in pooled], [one.mean(0) for one in hidden])


def test_normalised_and_shortened(folder: Path, hidden: list[Any]) -> None:
    llm = LLM(folder, **FLAGS)  # without a word: the last token's, normalised
    check(embed(llm, PROMPTS), [one[-1] / np.linalg.norm(one[-1]) for one in hidden])
    short = [one[-1][:5] for one in hidden]
    check(embed(llm, PROMPTS, dimensions=5), [one / np.linalg.norm(one) for one in short])
    with pytest.raises(InvalidRequest, match="dimensions"):
        embed(llm, PROMPTS, dimensions=33)
    with pytest.raises(InvalidRequest, match="empty"):
        embed(llm, [[]])
    with pytest.raises(InvalidRequest, match="may have 96"):
        embed(llm, [[5] * 96])


def test_tokens_behind_a_prompt(folder: Path) -> None:
    """What rerankers are judged by."""
    llm = LLM(folder, **FLAGS)
    params = pooling_params(Pooling("tokens", token_ids=(7, 9, 5)))
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False)
    model = TINY.build()
    for ids, output in zip(PROMPTS, outputs, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[[7, 9, 5]].numpy()
        np.testing.assert_allclose(np.frombuffer(output.pooled, np.float32), expected, rtol=1e-5, atol=1e-5)


# ---- what models and flags say


def modules(folder: Path, *kinds: str, **pooling: Any) -> Path:
    described = [
        {"idx": i, "path": f"{i}_{kind}" if i else "", "type": f"x.{kind}"} for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(described))
    for i, kind in enumerate(kinds):
        if kind in ("Pooling", "LogitScore") and pooling:
            (folder / f"{i}_{kind}").mkdir()
            (folder / f"{i}_{kind}" / "config.json").write_text(json.dumps(pooling))
    return folder


OLD = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "include_prompt": True}
ST = ("Transformer", "Pooling", "Normalize")


@pytest.mark.parametrize(
    ("kinds", "values", "flags", "expected"),
    [
        ((), {}, {}, Pooling("last", True)),
        (ST, {**OLD, "pooling_mode_mean_tokens": True}, {}, Pooling("mean", True)),
        (ST, {**OLD, "pooling_mode_lasttoken": True}, {}, Pooling("last", True)),
        (ST[:2], {"embedding_dimension": 32, "pooling_mode": "cls"}, {}, Pooling("cls", False)),
        (ST, {"pooling_mode": "mean"}, {"pooler_config": config("CLS")}, Pooling("cls", True)),
        (ST[:2], {"pooling_mode": "mean"}, {"pooler_config": '{"normalize": true}'}, Pooling("mean", True)),
        ((*ST, "Dense"), {"pooling_mode": "mean"}, {"pooler_config": config("LAST")}, Pooling("last", True)),
        (
            ("Transformer", "LogitScore"),
            {"true_token_id": 9, "false_token_id": 7},
            {},
            Pooling("tokens", token_ids=(7, 9)),
        ),
    ],
)
def test_what_is_pooled(
    folder: Path, tmp_path: Path, kinds: Any, values: Any, flags: Any, expected: Pooling
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    limits = LLM(modules(tmp_path, *kinds, **values) if kinds else tmp_path, **FLAGS, **flags).engine.limits
    got = limits.pooling
    assert (got.kind, got.normalize, got.token_ids) == (expected.kind, expected.normalize, expected.token_ids)
    assert got.problem == ""
    assert limits.generates


@pytest.mark.parametrize(
    ("kinds", "values", "flags", "message"),
    [
        ((*ST, "Dense"), {"pooling_mode": "mean"}, {}, "need Dense"),
        (ST, {}, {}, "config.json that is missing"),
        (ST, {"pooling_mode": "max"}, {}, "pools max"),
        (
            ST,
            {**OLD, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
            {},
            "lasttoken and mean_tokens",
        ),
        (("Transformer", "LogitScore"), {"true_token_id": 9}, {}, "both yes and no"),
        ((), {}, {"runner": "generate"}, "--runner"),
    ],
)
def test_what_cannot_be_pooled(
    folder: Path, tmp_path: Path, kinds: Any, values: Any, flags: Any, message: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    llm = LLM(modules(tmp_path, *kinds, **values) if kinds else tmp_path, **FLAGS, **flags)
    with pytest.raises(InvalidRequest, match=message):
        embed(llm, PROMPTS)


def test_a_runner_that_only_pools(folder: Path) -> None:
    llm = LLM(folder, **FLAGS, runner="pooling")
    assert len(embed(llm, PROMPTS[:1])[0]) == 32
    with pytest.raises(InvalidRequest, match="--runner"):
        llm.generate(prompt_token_ids=PROMPTS, use_tqdm=False)


@pytest.mark.parametrize(
    "given", ["x", "[]", '{"pooling_type": "MAX"}', '{"normalize": 1}', '{"a": 1}', '{"pooling_type": 5}']
)
def test_configs_that_are_none(folder: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="--pooler_config"):
        LLM(folder, **FLAGS, pooler_config=given)
