"""Engines of tiny models for tests; `stepping` drives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hex_llm.config import EngineConfig
from hex_llm.engine.engine import Engine
from hex_llm.engine.loading import build_engine, open_files
from hex_llm.scheduling.limits import prefix_unit
from tests.engine.stepping import GREEDY as GREEDY
from tests.engine.stepping import drive as drive
from tests.engine.stepping import request as request
from tests.engine.stepping import tokens as tokens
from tests.tiny import Tiny

LLAMA = Tiny("llama", "LlamaForCausalLM")


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
