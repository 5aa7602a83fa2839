"""Engines driven step by step, with every invariant checked after each. Without the judge's libraries, which
processes of tests would be long in loading."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hex_llm.engine.engine import Engine
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import Request, Update

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


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
