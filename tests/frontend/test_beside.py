"""Work beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hex_llm.errors import QueueFull
from hex_llm.frontend.beside import LONG_TEXT, MAX_LONG_TEXTS, read


def test_so_many_long_texts_may_wait_and_no_short_one_behind_them() -> None:
    go_on = threading.Event()

    async def run() -> None:
        waiting = [asyncio.create_task(read(LONG_TEXT, go_on.wait)) for _ in range(MAX_LONG_TEXTS)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await read(LONG_TEXT, go_on.wait)
        assert await read(10, lambda: "short") == "short"
        go_on.set()
        await asyncio.gather(*waiting)
        assert await read(LONG_TEXT, go_on.wait)

    asyncio.run(asyncio.wait_for(run(), 30))
