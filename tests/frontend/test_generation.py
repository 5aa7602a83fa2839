"""A request under way: what its reader is told, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from hex_llm.errors import HexError
from hex_llm.frontend.outputs import OutputCollector
from hex_llm.frontend.requests import Generation
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import FinishReason, Request, Update


def under_way() -> Generation:
    return Generation(OutputCollector(Request("r", [1], SamplingParams()), None))


def token(token_id: int, **more: Any) -> Update:
    return Update("r", 0, [token_id], **more)


END = {"finish_reason": FinishReason.LENGTH}


def while_read(test: Callable[[Generation, list[list[int]]], Coroutine[Any, Any, None]]) -> None:
    """Runs the test beside a reader, whose findings it sees."""

    async def run() -> None:
        generation, found = under_way(), list[list[int]]()

        async def read() -> None:
            async for delta in generation:
                found.append(delta.token_ids)

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        await test(generation, found)
        await asyncio.wait_for(reading, 5)

    asyncio.run(run())


def test_a_reader_gets_together_what_came_before_its_turn() -> None:
    async def test(generation: Generation, found: list[list[int]]) -> None:
        generation.add(token(5))
        generation.add(token(6))
        await asyncio.sleep(0)
        assert found == [[5, 6]]
        generation.add(token(7), tell=False)
        await asyncio.sleep(0)
        assert found == [[5, 6]]
        generation.tell()
        generation.tell()
        await asyncio.sleep(0)
        assert found == [[5, 6], [7]]
        generation.add(token(8, **END), tell=False)  # an end is never kept back
        await asyncio.sleep(0)
        assert found == [[5, 6], [7], [8]]

    while_read(test)


def test_news_may_be_taken_in_place_of_the_reader_but_not_the_end() -> None:
    async def test(generation: Generation, found: list[list[int]]) -> None:
        taken, willing = list[list[int]](), True

        def write_inline() -> bool:
            if willing:
                taken.extend(delta.token_ids for delta in generation.collector.deltas())
            return willing

        generation.write_inline = write_inline
        generation.add(token(5))
        generation.add(token(6))
        assert taken == [[5], [6]]  # in the same turn
        willing = False
        generation.add(token(7))
        willing = True
        generation.add(token(8))  # the reader has been woken, so the news is his, in its order
        assert (taken, found) == ([[5], [6]], [])
        await asyncio.sleep(0)
        generation.add(token(9))
        assert (taken, found) == ([[5], [6], [9]], [[7, 8]])
        generation.add(token(10, **END))
        await asyncio.sleep(0)
        assert (taken, found) == ([[5], [6], [9]], [[7, 8], [10]])

    while_read(test)


def test_who_is_not_waiting_is_not_passed_by() -> None:
    async def run() -> None:
        generation = under_way()
        generation.write_inline = lambda: pytest.fail("the reader has not read what was before")
        generation.add(token(5))
        first = await generation.take()
        generation.add(token(6))
        assert [delta.token_ids for delta in first + await generation.take()] == [[5], [6]]

    asyncio.run(run())


def test_a_failure_is_raised_after_the_news() -> None:
    async def run() -> None:
        generation = under_way()
        generation.add(token(5))
        generation.fail(HexError("broken"))
        assert len(await generation.take()) == 1
        for wait in (generation.take, generation.until_end):
            with pytest.raises(HexError, match="broken"):
                await wait()

    asyncio.run(run())
