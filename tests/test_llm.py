"""LLM, the offline front: its flags, its refusals, and that a batch changes nothing."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hex_llm import LLM, SamplingParams
from hex_llm.errors import ConfigError, InvalidRequest
from tests.tiny import LLAMA3, Tiny, greedy_tokens

LLAMA = Tiny("llama", "LlamaForCausalLM", LLAMA3)
MISTRAL = Tiny("mistral", "MistralForCausalLM", {"sliding_window": 8}, prompt_len=40)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_blocks": 128,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    LLAMA.save(folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(model=folder, **FLAGS)


def tokens(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_batch_gives_what_each_gets_alone(llm: LLM) -> None:
    prompts = [LLAMA.prompt(seed)[: 1 + 2 * seed] for seed in range(9)]
    together = tokens(llm, prompts)
    assert together == [tokens(llm, [prompt])[0] for prompt in prompts]
    assert llm.engine.stepper.scheduler.pool.num_free == llm.engine.stepper.scheduler.pool.num_usable


def test_more_prompts_than_fit_at_once(folder: Path, llm: LLM) -> None:
    prompts = [LLAMA.prompt(seed) for seed in range(6)]
    small = LLM(model=folder, **{**FLAGS, "num_blocks": 7, "block_size": 8, "max_decode_seqs": 3})
    assert tokens(small, prompts) == tokens(llm, prompts)


def test_several_prompts_in_one_prefill(folder: Path, llm: LLM) -> None:
    prompts = [LLAMA.prompt(seed)[: 3 + 5 * seed] for seed in range(5)]
    together = LLM(model=folder, **FLAGS, max_prefill_seqs=3, prefill_seqs_padding=2, prefill_len_padding=16)
    assert tokens(together, prompts) == tokens(llm, prompts)


@pytest.mark.parametrize(
    "flags",
    [
        {"block_size": 8},
        pytest.param({"block_size": 2048}, marks=pytest.mark.slow),
        pytest.param({"decode_blocks_padding": 1}, marks=pytest.mark.slow),
    ],
)
def test_memory_layout_changes_nothing(folder: Path, llm: LLM, flags: dict[str, Any]) -> None:
    prompts = [LLAMA.prompt(0), LLAMA.prompt(1)[:5]]
    assert tokens(LLM(model=folder, **{**FLAGS, **flags}), prompts) == tokens(llm, prompts)


@pytest.mark.slow
def test_op_by_op_gives_the_same(folder: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    eager = LLM(model=folder, **FLAGS, enable_jit=False)
    assert tokens(eager, [LLAMA.prompt()], params) == tokens(llm, [LLAMA.prompt()], params)


@pytest.mark.slow
def test_after_warm_up_nothing_is_compiled(folder: Path, llm: LLM) -> None:
    flags = {**FLAGS, "max_model_len": 64, "max_decode_seqs": 5, "prefill_len_padding": 32}
    warm = LLM(model=folder, **flags, warmup=True)
    compiled = set(warm.engine.stepper.runner.compiled)
    prompts = [LLAMA.prompt(seed)[: 1 + 4 * seed] for seed in range(6)]
    assert tokens(warm, prompts) == tokens(llm, prompts)
    assert set(warm.engine.stepper.runner.compiled) == compiled


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 8])
def test_devices_change_nothing(tmp_path: Path, devices: int) -> None:
    """2 KV heads: one for each of two devices, and each held four times by eight."""
    tiny = Tiny("wide", "LlamaForCausalLM", {"num_attention_heads": 8})
    tiny.save(tmp_path)
    one, many = LLM(model=tmp_path, **FLAGS), LLM(model=tmp_path, **FLAGS, tensor_parallel_size=devices)
    assert tokens(many, [tiny.prompt()]) == tokens(one, [tiny.prompt()])


def test_steps_take_as_long_as_they_take(llm: LLM) -> None:
    assert llm.engine.stepper.scheduler.limits.target_s > 10**6


def test_devices_that_do_not_divide_or_exist(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 heads, 2 KV heads .* can be split over 1, 2, 4 devices"):
        LLM(model=folder, **FLAGS, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"only 8 cpu device.*xla_force_host_platform_device_count=16"):
        LLM(model=folder, **FLAGS, tensor_parallel_size=16)
    with pytest.raises(ConfigError, match="--num_hosts=4: 16 devices are needed, and there are 8 here"):
        LLM(model=folder, **FLAGS, tensor_parallel_size=16, num_hosts=4)


def test_hosts_that_are_not_needed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Public notebooks pass --num_hosts=4 for models that fit one host."""
    LLM(model=folder, **FLAGS, tensor_parallel_size=4, num_hosts=4)
    assert "one host serves" in caplog.text


def judged(folder: Path, tiny: Tiny, **config: Any) -> list[int]:
    model = tiny.save(folder)
    for name, value in config.items():
        setattr(model.config, name, value)
    return greedy_tokens(model, tiny.prompt(), 20)


@pytest.mark.slow
def test_sliding_window_override(tmp_path: Path) -> None:
    wider = judged(tmp_path, MISTRAL, sliding_window=20)
    assert tokens(LLM(model=tmp_path, **FLAGS, sliding_window=20), [MISTRAL.prompt()]) == [wider]
    assert tokens(LLM(model=tmp_path, **FLAGS), [MISTRAL.prompt()]) != [wider]


def test_sliding_window_where_the_model_has_none(tmp_path: Path) -> None:
    tiny = Tiny("full", "MistralForCausalLM", {"sliding_window": None}, prompt_len=40)
    windowed = judged(tmp_path, tiny, sliding_window=8)
    assert tokens(LLM(model=tmp_path, **FLAGS, sliding_window=8), [tiny.prompt()]) == [windowed]


def test_end_of_sequence(folder: Path, llm: LLM) -> None:
    free = tokens(llm, [LLAMA.prompt()])[0]
    stop = free[7]
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    [out] = llm.generate(prompt_token_ids=[LLAMA.prompt()], sampling_params=params, use_tqdm=False)
    assert out.outputs[0].token_ids == free[: free.index(stop) + 1]
    assert out.outputs[0].finish_reason == "stop"
    [out] = llm.generate(prompt_token_ids=[LLAMA.prompt()], sampling_params=GREEDY, use_tqdm=False)
    assert out.outputs[0].finish_reason == "length"


def test_output_ends_at_the_length_limit(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    prompt = LLAMA.prompt() * 10
    assert len(tokens(llm, [prompt], params)[0]) == 256 - len(prompt)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([1] * 256, r"256 tokens; .* 256"),
        ([128], "0 to 127"),
        ([-1], "0 to 127"),
        ([True], "whole number"),
        ([1.0], "whole number"),
        ([2**40], "0 to 127"),
        ([None], "whole number"),
    ],
)
def test_prompts_that_are_refused(llm: LLM, prompt: list[Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt_token_ids=[LLAMA.prompt(), prompt], use_tqdm=False)
    assert not llm.engine.has_work, "a refused call leaves nothing behind"


def test_a_small_kv_cache_is_told_and_ends_outputs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = LLM(model=folder, **{**FLAGS, "num_blocks": 2})
    assert "the KV cache holds 64 tokens, less than the context of 256" in caplog.text
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    assert len(tokens(small, [LLAMA.prompt()], params)[0]) == 64 - len(LLAMA.prompt())


def test_what_can_never_fit_is_refused(folder: Path) -> None:
    small = LLM(model=folder, **{**FLAGS, "num_blocks": 2})
    with pytest.raises(InvalidRequest, match=r"need 4 KV blocks of 32 tokens, but there are only 2"):
        tokens(small, [LLAMA.prompt()], SamplingParams(temperature=0, max_tokens=100))


def test_wrong_calls(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="prompt_token_ids instead"):
        llm.generate("text")
    with pytest.raises(InvalidRequest, match="either"):
        llm.generate("text", prompt_token_ids=[[1]])
    with pytest.raises(InvalidRequest, match="2 sampling_params for 1"):
        llm.generate(prompt_token_ids=[[1]], sampling_params=[GREEDY, GREEDY])
    with pytest.raises(InvalidRequest, match="1 priority for 2 prompts"):
        llm.generate(prompt_token_ids=[[1], [2]], priority=[0])
    with pytest.raises(ConfigError, match="did you mean"):
        LLM(max_modle_len=3)


def test_nothing_that_was_there_is_searched_for_garbage_meanwhile(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, step = [], llm.engine.step

    def counted() -> Any:
        counts.append(gc.get_freeze_count())
        return step()

    monkeypatch.setattr(llm.engine, "step", counted)
    gc.unfreeze()
    llm.generate(prompt_token_ids=[[5, 6]], sampling_params=SamplingParams(max_tokens=2))
    assert min(counts) > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()
    llm.generate(prompt_token_ids=[[5, 6]], sampling_params=SamplingParams(max_tokens=2))
    assert gc.get_freeze_count() > 10_000, "the caller's own"
    gc.unfreeze()


def test_numpy_ids(llm: LLM) -> None:
    assert tokens(llm, [np.array(LLAMA.prompt())]) == tokens(llm, [LLAMA.prompt()])


def test_own_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [len(ids) for ids in tokens(llm, [[1], [2]], params)] == [3, 5]


@pytest.mark.slow
def test_dummy_weights_need_only_a_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    first, again = (LLM(model=tmp_path, **FLAGS, load_format="dummy", seed=3) for _ in range(2))
    assert tokens(first, [[5, 6, 7]]) == tokens(again, [[5, 6, 7]])
    other = LLM(model=tmp_path, **FLAGS, load_format="dummy", seed=4, tensor_parallel_size=2)
    assert tokens(other, [[5, 6, 7]]) != tokens(first, [[5, 6, 7]])
