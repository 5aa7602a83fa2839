"""The life of the worker process: its loading, its death, its end; only the engine in it is a fake."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from hex_llm.errors import ConfigError, EngineStopped, HexError, ModelError
from hex_llm.frontend import process as module
from hex_llm.frontend.client import EngineClient
from hex_llm.ipc.children import private_folder
from hex_llm.ipc.protocol import report_address
from hex_llm.ipc.stats import EngineState
from hex_llm.sampling_params import SamplingParams
from tests.frontend.clients import CONFIG, LONG, SHORT, complete, process_of, until, with_client
from tests.server.fakes import (
    FAILS_TO_STEP,
    HANGS,
    fake_worker,
)

# ---- the engine's death


def assert_all_stopped(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert isinstance(outcome, EngineStopped)
        assert "0x7f" not in str(outcome)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_engine_ends_every_request(sign: signal.Signals) -> None:
    async def test(client: EngineClient) -> None:
        tasks = [asyncio.create_task(complete(client, [i], LONG)) for i in range(5, 55)]
        await until(lambda: client.replicas[0].status.num_steps > 3)
        started = time.monotonic()
        os.kill(process_of(client).pid, sign)
        assert_all_stopped(await asyncio.gather(*tasks, return_exceptions=True))
        assert time.monotonic() - started < 25
        assert not client.ready
        assert not client.replicas[0].requests
        with pytest.raises(EngineStopped, match="restarted"):
            await complete(client, [5], SHORT)

    with_client(test, "FakeEngine(step_s=0.01)")


def test_a_dead_engine_is_started_again(tmp_path: Path) -> None:
    async def test(client: EngineClient) -> None:
        for _ in range(2):
            dead = process_of(client)
            task = asyncio.create_task(complete(client, [5], LONG))
            await until(lambda: client.replicas[0].status.num_pending and client.replicas[0].status.num_steps)
            dead.kill()
            with pytest.raises(EngineStopped):
                await task
            assert not client.ready
            await until(lambda: client.ready)
            assert process_of(client).pid != dead.pid
            assert client.replicas[0].status.num_pending == 0
            output = await complete(client, "hello", SamplingParams(max_tokens=None))
            assert output.outputs[0].text == "olleh"

    with_client(test, "FakeEngine(step_s=0.01)")


@pytest.mark.parametrize("again", ["FakeEngine()", "fail(ModelError('gone'))"])
def test_an_engine_that_always_dies_is_given_up(
    again: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it dies at its first request or while it is loaded again."""
    mark = tmp_path / "mark"
    load = f"({again}) if Path({str(mark)!r}).exists() else FakeEngine()"

    async def test(client: EngineClient) -> None:
        mark.touch()
        while "not started again" not in caplog.text:
            if client.ready:
                with contextlib.suppress(psutil.NoSuchProcess):  # it may be gone before that is known
                    process_of(client).kill()
            await asyncio.sleep(0.2)
        assert caplog.text.count("starting the engine again") == module.MAX_RESTARTS
        with pytest.raises(EngineStopped, match=EngineState.GIVEN_UP.value):
            await complete(client, [5], SHORT)

    with_client(test, load)


def test_stopping_while_the_engine_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    async def test(client: EngineClient) -> None:
        mark.touch()
        dead = client.replicas[0].supervisor.process
        process_of(client).kill()
        await until(
            lambda: (
                client.replicas[0].status.state is EngineState.RESTARTING
                and client.replicas[0].supervisor.process is not dead
            )
        )

    with_client(test, f"time.sleep(60) if Path({str(mark)!r}).exists() else FakeEngine()")


def test_a_failing_step_ends_every_request() -> None:
    async def test(client: EngineClient) -> None:
        prompts = [[5], [6], [FAILS_TO_STEP, 7, 8, 9]]
        tasks = [asyncio.create_task(complete(client, prompt, LONG)) for prompt in prompts]
        assert_all_stopped(await asyncio.gather(*tasks, return_exceptions=True))
        assert not client.ready

    with_client(test, "FakeEngine(step_s=0.01)")


def test_an_engine_that_hangs_is_killed_in_the_end() -> None:
    async def test(client: EngineClient) -> None:
        task = asyncio.create_task(complete(client, [HANGS], SHORT))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await client.stop(0.5)
        assert time.monotonic() - started < 25
        assert_all_stopped(await asyncio.gather(task, return_exceptions=True))

    with_client(test)


def test_shutting_down_answers_every_request() -> None:
    async def test(client: EngineClient) -> None:
        task = asyncio.create_task(complete(client, [5], LONG))
        await until(lambda: client.replicas[0].status.num_steps)
        client.fail(EngineState.SHUTTING_DOWN)
        with pytest.raises(EngineStopped, match="shutting down"):
            await task

    with_client(test, "FakeEngine(step_s=0.01)")


def test_malformed_reports_are_dropped() -> None:
    async def test(client: EngineClient) -> None:
        task = asyncio.create_task(complete(client, [5], LONG))
        draw = random.Random(0)
        process = client.replicas[0].supervisor.process
        assert process is not None
        stranger = process.link.context.socket(zmq.PUSH)
        stranger.set(zmq.SNDHWM, 0)
        stranger.connect(report_address(process.folder))
        for _ in range(10_000):
            stranger.send(draw.randbytes(draw.randint(0, 200)))
        assert len((await task).outputs[0].token_ids) == 4000
        await until(lambda: process.link.reader.num_malformed == 10_000)
        assert client.ready
        stranger.close(linger=0)

    with_client(test)


# ---- loading


@pytest.mark.parametrize(
    ("load", "kind", "message"),
    [
        ("fail(ModelError('no such model'))", ModelError, "no such model"),
        ("fail(ConfigError('--dtype: no'))", ConfigError, "--dtype: no"),
        ("fail(RuntimeError('a\\nb'))", ModelError, "the engine failed: RuntimeError: a b"),
        ("sys.exit(7)", ModelError, "the engine's process ended with the exit code 7"),
        ("__import__('os').abort()", ModelError, "the engine's process was killed by SIGABRT"),
    ],
)
def test_a_failure_to_load_is_raised(load: str, kind: type[HexError], message: str) -> None:
    async def run() -> None:
        client = EngineClient(CONFIG, "fake", fake_worker(load))
        with pytest.raises(HexError) as caught:
            await asyncio.wait_for(client.start(), 30)
        assert (type(caught.value), str(caught.value)) == (kind, message)
        assert not client.ready
        await client.stop(5)
        assert client.replicas[0].supervisor.process is not None
        assert not client.replicas[0].supervisor.process.folder.exists()

    asyncio.run(run())


def test_loading_can_be_given_up() -> None:
    async def run() -> None:
        client = EngineClient(CONFIG, "fake", fake_worker("time.sleep(600)"))
        starting = asyncio.create_task(client.start())
        await until(
            lambda: client.replicas[0].supervisor.process and client.replicas[0].supervisor.process.is_running
        )
        worker = process_of(client)
        with pytest.raises(EngineStopped, match="being loaded"):
            await complete(client, [5], SHORT)
        starting.cancel()
        started = time.monotonic()
        await client.stop(60)
        assert time.monotonic() - started < 25
        assert not worker.is_running()

    asyncio.run(run())


def test_a_client_that_was_never_started_can_be_stopped() -> None:
    asyncio.run(EngineClient(CONFIG).stop(1))


def test_sockets_have_short_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(deep))
    folder = private_folder()
    assert len(str(folder)) < 50
    folder.rmdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/nowhere")
    with pytest.raises(ConfigError, match="/nowhere"):
        private_folder()
