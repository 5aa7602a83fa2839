"""Engines of tiny models for tests, driven step by step with every invariant checked after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hex_llm.config import EngineConfig
from hex_llm.engine.engine import Engine
from hex_llm.engine.loading import build_engine, open_files
from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling.limits import prefix_unit
from hex_llm.types import Request, Update
from tests.tiny import Tiny

LLAMA = Tiny("llama", "LlamaForCausalLM")
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def make_config(folder: Path, **flags: Any) -> EngineConfig:
    """Without a tokenizer: token ids in, token ids out."""
    small = {"num_blocks": 64, "max_decode_seqs": 8, "max_model_len": 256, "dtype": "float32"}
    return EngineConfig(model=str(folder), skip_tokenizer_init=True, **{**small, **flags})


def make_engine(folder: Path, grammars: Any = None, **flags: Any) -> Engine:
    config = make_config(folder, **flags)
    engine = build_engine(config, open_files(config), None)
    return engine if grammars is None else fresh_engine(engine, grammars)


def fresh_engine(engine: Engine, grammars: Any = None, config: EngineConfig | None = None) -> Engine:
    """Another one with the same weights, pages and programs; `config` may differ in the rest. Of
    the limits of a step, which the runner holds, that is the prefix cache's unit."""
    runner, config = engine.stepper.runner, config or engine.config
    runner.paddings.limits = replace(runner.paddings.limits, prefix_unit=prefix_unit(config))
    return Engine(config, engine.spec, runner, engine.stepper.scheduler.pool.num_blocks, grammars)


def request(name: str, prompt_ids: list[int], params: SamplingParams = GREEDY, **more: Any) -> Request:
    return Request(name, prompt_ids, params, **more)


def drive(
    engine: Engine, requests: Iterable[Request] = (), between: Callable[[int], None] | None = None
) -> dict[tuple[str, int], list[Update]]:
    """Runs everything to its end; `between` is called with a number before each step."""
    for one in requests:
        engine.add(one)
    updates: dict[tuple[str, int], list[Update]] = {}
    for i in range(100_000):
        if not engine.has_work:
            break
        if between is not None:
            between(i)
        for update in engine.step():
            updates.setdefault((update.request_id, update.index), []).append(update)
        engine.check()
    assert not engine.has_work, "it does not come to an end"
    for told in updates.values():
        assert [u.finish_reason is not None for u in told] == [False] * (len(told) - 1) + [True]
    return updates


def tokens(updates: list[Update]) -> list[int]:
    return [token_id for update in updates for token_id in update.token_ids]
