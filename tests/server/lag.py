"""How long an event loop lets everybody else wait while it is asked something."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from tests.server.fakes import FakeBackend

T = TypeVar("T")
TURN_S = 0.001
TICK_S = 0.002


async def watched(work: Awaitable[T]) -> tuple[T, float, float]:
    """Its result, the longest pause of the loop meanwhile, and how long it took in all, in seconds.

    Of a pause only so much counts as this process was at work: others may keep the machine to themselves.
    """
    longest, ticking = 0.0, True

    async def tick() -> None:
        nonlocal longest
        while ticking:
            before, used = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            longest = max(longest, min(time.monotonic() - before, time.process_time() - used))

    ticks = asyncio.create_task(tick())
    await asyncio.sleep(0)
    started = time.monotonic()
    result = await work
    took, ticking = time.monotonic() - started, False
    await ticks
    return result, longest, took


def asked(backend: FakeBackend, path: str, **given: Any) -> tuple[httpx.Response, float, float]:
    """As `watched`, of a POST to a new app."""
    app = create_app(backend, ServerConfig())

    async def send() -> tuple[httpx.Response, float, float]:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=300) as client:
            return await watched(client.post(path, **given))

    with like_a_server():
        return asyncio.run(send())


@contextmanager
def like_a_server() -> Iterator[None]:
    """What a server sets when it has started; the tests' own objects are many more than its."""
    before = sys.getswitchinterval(), gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before[0])
        gc.set_threshold(*before[1])
        gc.unfreeze()
