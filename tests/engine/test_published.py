"""What the prefix cache hands out was computed from the tokens that it is found by, whatever failed before.

The judge computes every published block anew, in an engine of its own, from the tokens of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hex_llm.engine.engine import Engine
from hex_llm.execution.runner import CompiledLate
from hex_llm.execution.slots import SlotLayout
from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling import sequence
from hex_llm.types import FinishReason
from tests.engine.driving import drive, make_engine, request, tokens

SECRET, PREFIX = [100 + i for i in range(24)], [3 + i for i in range(20)]
FLAGS: dict[str, Any] = {"block_size": 8, "max_decode_seqs": 2, "max_model_len": 64, "num_blocks": 40}
CACHED = {"enable_prefix_cache_hbm": True, "prefix_cache_unit": "block"}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Judge:
    """Knows the tokens behind every key that is made."""

    def __init__(self, fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """`fresh` shares no blocks: whenever it is idle its pool hands out 1, 2, ..."""
        self._fresh = fresh
        self._made: dict[bytes, tuple[bytes, tuple[int, ...]]] = {}
        plain = sequence.next_key

        def next_key(parent: bytes, token_ids: Sequence[int], extra: Sequence[str]) -> bytes:
            key = plain(parent, token_ids, extra)
            self._made[key] = (parent, tuple(token_ids))
            return key

        monkeypatch.setattr(sequence, "next_key", next_key)

    def tokens_of(self, key: bytes) -> list[int]:
        """All, from the beginning of the text."""
        parent, own = self._made[key]
        return [*(self.tokens_of(parent) if parent in self._made else ()), *own]

    def check(self, engine: Engine) -> int:
        """How many published blocks there were, all of them right."""
        published = dict(engine.stepper.scheduler.pool.published)
        for key, block in published.items():
            prompt = self.tokens_of(key)
            drive(self._fresh, [request("judge", [*prompt, 1], SamplingParams(temperature=0, max_tokens=1))])
            last = len(prompt) // FLAGS["block_size"]
            for mine, theirs in zip(
                self._fresh.stepper.runner.pages, engine.stepper.runner.pages, strict=True
            ):
                np.testing.assert_allclose(np.asarray(theirs[block]), np.asarray(mine[last]), atol=1e-4)
        return len(published)


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Engine:
    return make_engine(folder, **FLAGS, enable_prefix_cache_hbm=False)


@pytest.fixture
def judge(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> Judge:
    return Judge(fresh, monkeypatch)


def victim(engine: Engine) -> list[int]:
    return tokens(drive(engine, [request("victim", [*PREFIX, 7], GREEDY)])["victim", 0])


@pytest.mark.parametrize("overlapped", [True, False])
def test_ordinary_traffic(folder: Path, judge: Judge, overlapped: bool) -> None:
    engine = make_engine(folder, **FLAGS, **CACHED, async_scheduling=overlapped)
    prompts = [PREFIX, SECRET, [*PREFIX, 9, 9], PREFIX[:9], [*SECRET, *PREFIX]]
    drive(engine, [request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)])
    assert judge.check(engine) >= 8


@pytest.mark.parametrize("alone", [True, False])
def test_a_request_that_fails_before_it_is_sent_publishes_nothing(
    folder: Path, fresh: Engine, judge: Judge, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """Its slot still holds its former owner's tokens: KV of these must not be found by its own."""
    expected = victim(fresh)
    engine = make_engine(folder, **FLAGS, **CACHED, max_prefill_seqs=2)
    drive(engine, [request(f"owner{i}", SECRET, GREEDY) for i in range(2)])
    plain = SlotLayout.record

    def fails(self: SlotLayout, params: SamplingParams, *others: Any) -> Any:
        if params is bad.params:
            raise RuntimeError("its mask cannot be made")
        return plain(self, params, *others)

    monkeypatch.setattr(SlotLayout, "record", fails)
    bad = request("bad", PREFIX, replace(GREEDY))
    neighbours = [] if alone else [request("neighbour", SECRET[::-1], GREEDY)]
    ended = drive(engine, [bad, *neighbours])
    assert ended["bad", 0][-1].finish_reason is FinishReason.ERROR
    judge.check(engine)
    assert victim(engine) == expected


def test_a_step_that_is_not_compiled_publishes_nothing(
    folder: Path, fresh: Engine, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = victim(fresh)
    engine = make_engine(folder, **FLAGS, **CACHED)

    def refuse(_: Any) -> None:
        raise CompiledLate("too late")

    with monkeypatch.context() as patched:
        patched.setattr(engine.stepper.runner, "dispatch", refuse)
        ended = drive(engine, [request("bad", PREFIX, GREEDY)])
    assert ended["bad", 0][-1].finish_reason is FinishReason.ERROR
    assert judge.check(engine) == 0
    assert victim(engine) == expected
