"""A client with a real worker process around a fake engine, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest

from hex_llm.config import EngineConfig
from hex_llm.errors import EngineStopped
from hex_llm.frontend.client import EngineClient
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import RequestOutput
from tests.server.fakes import (
    byte_tokenizer,
    fake_worker,
)

CONFIG = EngineConfig(skip_tokenizer_init=True)
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)
SHORT = SamplingParams(max_tokens=1)


def with_client(
    test: Callable[[EngineClient], Awaitable[None]],
    load: str = "FakeEngine()",
    config: EngineConfig = CONFIG,
    **settings: float,
) -> None:
    """`settings` are attributes of the client."""

    async def run() -> None:
        client = EngineClient(config, "fake", fake_worker(load))
        for name, value in settings.items():
            setattr(client, name, value)
        assert not client.ready
        try:
            await asyncio.wait_for(client.start(), 30)
            assert client.ready
            client.tokenizer = byte_tokenizer()
            workers = [process_of(client, i) for i in range(len(client.replicas))]
            await asyncio.wait_for(test(client), 60)
        finally:
            folders = [one.supervisor.process.folder for one in client.replicas if one.supervisor.process]
            await client.stop(5)
        assert not any(worker.is_running() for worker in workers)
        assert len(folders) == len(workers)
        assert not any(folder.exists() for folder in folders)
        with pytest.raises(EngineStopped):
            await complete(client, [5], SHORT)

    asyncio.run(run())


async def complete(
    client: EngineClient, prompt: str | list[int], params: SamplingParams, **options: Any
) -> RequestOutput:
    """The whole output, once it is there; cancelled, the request is aborted."""
    async with client.generate(prompt, params, **options) as generation:
        await generation.until_end()
    return generation.output()


def process_of(client: EngineClient, replica: int = 0) -> psutil.Process:
    process = client.replicas[replica].supervisor.process
    assert process is not None
    return psutil.Process(process.pid)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)
