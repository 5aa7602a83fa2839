"""When programs are compiled: all in the warm-up; what is late is counted, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from hex_llm.sampling_params import SamplingParams
from hex_llm.types import Chunk, FinishReason, StepPlan
from tests.engine.driving import LLAMA, drive, make_engine, request
from tests.engine.test_engine import PROMPT, greedy


def test_a_late_compilation_is_counted_or_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = {"max_decode_seqs": 1, "max_model_len": 64, "enable_prefix_cache_hbm": False}
    warm = make_engine(folder, **few)
    warm.warm_up()
    drive(warm, [request("r", PROMPT, greedy(max_tokens=4, prompt_logprobs=1, logit_bias={1: 1.0}))])
    assert warm.stepper.runner.num_late_compiles == 0
    prompt = Chunk(1, 0, len(PROMPT), (), 0, True)
    forgotten = warm.stepper.runner.paddings.shape(StepPlan(prefills=(prompt,)))
    del warm.stepper.runner.compiled[forgotten]
    drive(warm, [request("r", PROMPT, greedy(max_tokens=4))])
    assert warm.stepper.runner.num_late_compiles == 1
    assert "after the warm-up" in caplog.text
    strict = make_engine(folder, **few, recompile="error")
    strict.stepper.runner.compiled = {k: v for k, v in warm.stepper.runner.compiled.items() if k != forgotten}
    strict.stepper.runner.is_warm = True
    told = drive(
        strict, [request("r", PROMPT, greedy(max_tokens=4)), request("s", [5] * 40, greedy(max_tokens=4))]
    )
    assert told["r", 0][-1].finish_reason is FinishReason.ERROR
    assert "--recompile=error" in told["r", 0][-1].error
    assert told["s", 0][-1].finish_reason is FinishReason.LENGTH, "it has another shape"


def test_nothing_else_is_compiled_on_the_way(folder: Path) -> None:
    """Not even small things behind jax's back, once everything has been warmed up."""
    engine = make_engine(folder, max_decode_seqs=2, max_model_len=32, prefill_len_padding=16)
    engine.warm_up()
    assert set(engine.stepper.runner.compiled) == set(engine.stepper.runner.all_programs())
    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        params = [greedy(max_tokens=4), SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, n=3)]
        drive(engine, [request(str(i), LLAMA.prompt(i)[: 2 + i], params[i % 2]) for i in range(8)])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
