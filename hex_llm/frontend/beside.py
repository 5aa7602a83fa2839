"""Work beside the event loop, which must not wait for one request: large work on few threads of its own, so
that nobody's small work waits behind it.

Threads take turns in the interpreter: large work must not be one long call that keeps it to itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hex_llm.errors import QueueFull

LARGE = 2048  # tokens and log-probabilities: what takes a few milliseconds
LONG_TEXT = 64 << 10  # characters

MAX_LONG_TEXTS = 64  # being read, and waiting for that

T = TypeVar("T")

# Threads begin with their first work.
_REPLIES = ThreadPoolExecutor(2, "reply")
_TEXTS = ThreadPoolExecutor(2, "text")
_REPORTS = ThreadPoolExecutor(1, "report")
_LONG_TEXTS: set[asyncio.Future[Any]] = set()


async def shaped(size: int, work: Callable[[], T]) -> T:
    """What the work makes of so many tokens and log-probabilities. A few are done at once: waking a thread
    takes longer."""
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_REPLIES, work)


async def read(size: int, work: Callable[[], T]) -> T:
    """What the work makes of a text of so many characters. QueueFull: too many long ones are waiting."""
    if size < LONG_TEXT:
        return await asyncio.to_thread(work)
    if len(_LONG_TEXTS) >= MAX_LONG_TEXTS:
        raise QueueFull(f"{MAX_LONG_TEXTS} long texts are being read, and no more may be")
    reading = asyncio.get_running_loop().run_in_executor(_TEXTS, work)
    _LONG_TEXTS.add(reading)
    reading.add_done_callback(_LONG_TEXTS.discard)
    return await reading


async def decoded(work: Callable[[], T]) -> T:
    """What the work makes of a report of the engine, behind which all others wait."""
    return await asyncio.get_running_loop().run_in_executor(_REPORTS, work)
