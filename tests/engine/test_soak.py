"""Random requests under odd flags, many of them aborted: nothing leaks, is lost, or is compiled late."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hex_llm.errors import QueueFull
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import FinishReason, Request
from tests.engine.driving import make_engine
from tests.tiny import Tiny

MAX_LEN = 40
SMALL = {"num_hidden_layers": 1, "vocab_size": 61}
TINY = Tiny("llama", "LlamaForCausalLM", SMALL)
WINDOWED = Tiny("windowed", "MistralForCausalLM", {**SMALL, "sliding_window": 7})
LONGROPE = Tiny(
    "longrope",
    "Phi3ForCausalLM",
    {
        **SMALL,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.5, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 16,
        },
    },
)
CHUNKED, APART = {"enable_chunked_prefill": True}, {"enable_chunked_prefill": False}
CACHED = {"enable_prefix_cache_hbm": True}
PER_BLOCK = {**CACHED, "prefix_cache_unit": "block"}
COMBINATIONS: list[tuple[Tiny, dict[str, Any]]] = [
    (TINY, {}),
    (TINY, {"block_size": 8, "num_blocks": 7, **PER_BLOCK}),
    (WINDOWED, {**CHUNKED, "max_num_batched_tokens": 5, "block_size": 8, "num_blocks": 9}),
    (LONGROPE, {**CHUNKED, **PER_BLOCK, "max_num_batched_tokens": 11, "block_size": 8, "num_blocks": 10}),
    (TINY, {"max_decode_seqs": 1, "num_blocks": 2}),
    (TINY, {"max_decode_seqs": 3, "decode_seqs_padding": 7, "prefill_len_padding": 13, **CACHED}),
    (TINY, {**APART, "max_prefill_seqs": 3, "prefill_seqs_padding": 2, "prefill_len_padding": 9}),
    (TINY, {**APART, "max_prefill_seqs": 5, "max_num_batched_tokens": 17, "decode_blocks_padding": 3}),
    (TINY, {"async_scheduling": False, **CHUNKED, **CACHED, "prefill_len_padding": 8}),
    (TINY, {"block_size": 2048}),
    (TINY, {"block_size": 8192, "num_blocks": 3, **PER_BLOCK}),
    (TINY, {"max_concurrent_requests": 4, "max_decode_seqs": 2}),
    (TINY, {**CHUNKED, "max_prefill_seqs": 4, "max_num_batched_tokens": 40, "max_decode_seqs": 6}),
    (TINY, {**APART, "prefill_len_padding": 1, "decode_seqs_padding": 1, "max_decode_seqs": 3}),
    (TINY, {"tensor_parallel_size": 2, "block_size": 8, "num_blocks": 12, **PER_BLOCK}),
    (WINDOWED, {**PER_BLOCK, "block_size": 16, "num_blocks": 6}),
    (WINDOWED, {"max_decode_seqs": 5, "decode_seqs_padding": 2, **CHUNKED, "max_num_batched_tokens": 6}),
    (LONGROPE, {**APART, "block_size": 8, "num_blocks": 6}),
    (LONGROPE, {**CACHED, "prefill_len_padding": 8, "block_size": 8, "async_scheduling": False}),
    (TINY, {**CHUNKED, **PER_BLOCK, "max_prefill_seqs": 2, "block_size": 8, "num_blocks": 6}),
]


def random_params(generator: random.Random) -> SamplingParams:
    pick = generator.choice
    return SamplingParams(
        n=pick([1, 1, 1, 2, 3]),
        temperature=pick([0, 0, 0.7, 1, 2]),
        top_p=pick([1, 0.9, 0.2]),
        top_k=pick([0, 3, 40]),
        min_p=pick([0, 0.1]),
        typical_p=pick([1, 0.8]),
        presence_penalty=pick([0, 0, 1]),
        repetition_penalty=pick([1, 1, 1.3]),
        logit_bias=pick([None, None, {3: 5.0, 60: -100.0}]),
        seed=pick([None, 5]),
        max_tokens=pick([None, 1, 2, 5, 12]),
        min_tokens=pick([0, 0, 1]),
        stop_token_ids=pick([(), (7, 8)]),
        allowed_token_ids=pick([None, None, tuple(range(40))]),
        logprobs=pick([None, None, 0, 3]),
        prompt_logprobs=pick([None, None, None, 1]),
        ignore_eos=pick([True, False]),
    )


def soak(folder: Path, tiny: Tiny, flags: dict[str, Any], num_requests: int) -> None:
    tiny.save(folder)
    small = {"num_blocks": 40, "max_decode_seqs": 4, "max_model_len": MAX_LEN, "recompile": "error"}
    engine = make_engine(folder, allow_priority=True, **{**small, **flags})
    engine.warm_up()
    generator = random.Random(1)
    ends: dict[tuple[str, int], FinishReason] = {}
    doomed: dict[str, int] = {}  # requests to be aborted, and in how many steps
    num_choices: dict[str, int] = {}
    added = 0
    while added < num_requests or engine.has_work:
        while added < num_requests and generator.random() < 0.6:
            name, added = f"r{added}", added + 1
            prompt = [generator.randrange(3, 61) for _ in range(generator.randrange(1, MAX_LEN - 4))]
            if generator.random() < 0.5:
                prompt = [9] * (len(prompt) // 2) + prompt[len(prompt) // 2 :]
            bad_words = [[5, 6], [9]] if generator.random() < 0.2 else []
            params, priority = random_params(generator), generator.choice([0, 0, 1])
            try:
                engine.add(Request(name, prompt, params, priority, generator.choice(["", "s"]), bad_words))
            except QueueFull:
                added -= 1  # it comes again later
                break
            num_choices[name] = params.num_choices
            if generator.random() < 0.3:
                doomed[name] = generator.randrange(0, 8)
        for name in [name for name, steps in doomed.items() if steps == 0]:
            engine.abort(name)
        doomed = {name: steps - 1 for name, steps in doomed.items() if steps > 0}
        for update in engine.step():
            key = update.request_id, update.index
            assert key not in ends, "something came after the end"
            if update.finish_reason is not None:
                assert update.finish_reason is not FinishReason.ERROR, update.error
                ends[key] = update.finish_reason
        engine.check()
    assert len(ends) == sum(num_choices.values()), "exactly one end for each choice"
    assert engine.book.ledger["accepted"] == len(num_choices) == num_requests
    assert engine.book.ledger["finished"] + engine.book.ledger["aborted"] == len(num_choices)
    assert engine.book.ledger["aborted"] > num_requests * 0.1
    assert engine.stepper.runner.num_late_compiles == 0
    pool = engine.stepper.scheduler.pool
    assert pool.num_free == pool.num_usable, "blocks leaked"


@pytest.mark.parametrize("which", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_some_odd_flags(tmp_path: Path, which: int) -> None:
    soak(tmp_path, *COMBINATIONS[which], 120)


@pytest.mark.slow
@pytest.mark.parametrize("which", range(20))
def test_ten_thousand_requests_under_twenty_odd_flags(tmp_path: Path, which: int) -> None:
    soak(tmp_path, *COMBINATIONS[which], 500)
