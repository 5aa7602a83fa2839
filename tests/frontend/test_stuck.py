"""Engines that stop, hang or dawdle are ended and replaced, or left in peace; only the engine is a fake."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import psutil
import pytest

from hex_llm.errors import EngineStopped
from hex_llm.frontend import process as module
from hex_llm.frontend.client import EngineClient
from hex_llm.sampling_params import SamplingParams
from tests.frontend.clients import LONG, SHORT, complete, process_of, until, with_client
from tests.server.fakes import HANGS, seconds_until_gone

STUCK_S = 3


async def read(client: EngineClient, params: SamplingParams) -> list[int]:
    async with client.generate([5, 6], params) as generation:
        return [token_id async for delta in generation for token_id in delta.token_ids]


async def assert_serves_again(client: EngineClient, dead: psutil.Process) -> None:
    await until(lambda: client.ready)
    assert process_of(client).pid != dead.pid
    assert seconds_until_gone([dead]) < 5
    assert client.replicas[0].status.num_pending == 0
    assert len((await complete(client, [5], SHORT)).outputs[0].token_ids) == 1


def test_a_stopped_engine_is_ended_and_replaced() -> None:
    async def test(client: EngineClient) -> None:
        streams = [asyncio.create_task(read(client, LONG)) for _ in range(6)]
        await until(lambda: client.replicas[0].status.num_steps > 3)
        dead, stopped = process_of(client), time.monotonic()
        os.kill(dead.pid, signal.SIGSTOP)
        late = asyncio.create_task(complete(client, [5], SHORT))
        ends = await asyncio.wait_for(asyncio.gather(*streams, late, return_exceptions=True), 30)
        assert time.monotonic() - stopped < STUCK_S + 5
        assert all(isinstance(end, EngineStopped) for end in ends), ends
        await assert_serves_again(client, dead)

    with_client(test, "FakeEngine(step_s=0.01)", stuck_timeout_s=STUCK_S)


def test_an_engine_that_is_stopped_for_a_while_loses_nothing() -> None:
    async def test(client: EngineClient) -> None:
        streams = [asyncio.create_task(read(client, LONG)) for _ in range(3)]
        await until(lambda: client.replicas[0].status.num_steps > 3)
        worker = process_of(client)
        os.kill(worker.pid, signal.SIGSTOP)
        await asyncio.sleep(3)
        os.kill(worker.pid, signal.SIGCONT)
        assert await asyncio.gather(*streams) == [[6, 5] * 2000] * 3
        assert process_of(client).pid == worker.pid

    with_client(test, stuck_timeout_s=20)


def test_an_idle_engine_that_is_stopped_is_replaced_too() -> None:
    async def test(client: EngineClient) -> None:
        dead = process_of(client)
        os.kill(dead.pid, signal.SIGSTOP)
        await until(lambda: not client.ready)
        await assert_serves_again(client, dead)

    with_client(test, stuck_timeout_s=STUCK_S)


@pytest.mark.parametrize("group", ["the engine's", "its own"])
def test_children_of_a_stopped_engine_end_with_it(group: str) -> None:
    child = f"__import__('subprocess').Popen(['sleep', '600'], start_new_session={group == 'its own'})"

    async def test(client: EngineClient) -> None:
        dead = process_of(client)
        children = dead.children(recursive=True)
        assert len(children) == 1
        os.kill(dead.pid, signal.SIGSTOP)
        os.kill(children[0].pid, signal.SIGSTOP)
        await until(lambda: not client.ready)
        seconds_until_gone([dead, *children])

    with_client(test, f"[{child}, FakeEngine()][1]", stuck_timeout_s=STUCK_S)


def test_a_step_that_takes_too_long_is_ended() -> None:
    async def test(client: EngineClient) -> None:
        dead, began = process_of(client), time.monotonic()
        tasks = [asyncio.create_task(complete(client, [i], LONG)) for i in (5, HANGS)]
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert 2 < time.monotonic() - began < 25
        assert all(isinstance(end, EngineStopped) for end in ends), ends
        await assert_serves_again(client, dead)

    with_client(test, "FakeEngine(step_s=0.01)", step_timeout_s=2)


@pytest.mark.parametrize(
    ("load", "step_timeout_s"),
    [
        ("FakeEngine(step_s=5)", 60),
        ("FakeEngine(step_s=5)", 0),
        ("FakeEngine(step_s=5, is_compiling=True)", 2),
    ],
)
def test_a_long_step_within_its_time_is_left_in_peace(load: str, step_timeout_s: int) -> None:
    """Also with a time for silence that is shorter than it; what is spent on compiling does not count."""

    async def test(client: EngineClient) -> None:
        worker = process_of(client)
        task = asyncio.create_task(complete(client, [5], SHORT))
        await asyncio.sleep(4)
        stalled_s = client.replicas[0].status.stalled_s
        assert len((await task).outputs[0].token_ids) == 1
        assert process_of(client).pid == worker.pid
        # A step within its allowance is no stall; if there is none, who watches the server must judge.
        assert (stalled_s < 2.5) == bool(step_timeout_s)

    with_client(test, load, stuck_timeout_s=STUCK_S, step_timeout_s=step_timeout_s)


def test_many_short_steps_are_no_long_one() -> None:
    async def test(client: EngineClient) -> None:
        assert len(await read(client, SamplingParams(max_tokens=40, ignore_eos=True))) == 40

    with_client(test, "FakeEngine(step_s=0.1)", step_timeout_s=1)


def test_a_front_end_that_slept_blames_nobody() -> None:
    """Its own stop, longer than the engine may be silent: the beats of that time wait in its inbox."""

    async def test(client: EngineClient) -> None:
        worker = process_of(client)
        stream = asyncio.create_task(read(client, LONG))
        await until(lambda: client.replicas[0].status.num_steps > 3)
        os.kill(worker.pid, signal.SIGSTOP)  # both sleep, as on a laptop that is shut
        time.sleep(2 * STUCK_S)
        os.kill(worker.pid, signal.SIGCONT)
        assert await stream == [6, 5] * 2000
        assert process_of(client).pid == worker.pid

    with_client(test, stuck_timeout_s=STUCK_S, step_timeout_s=STUCK_S)


def test_loading_may_take_its_time_while_it_beats() -> None:
    async def test(client: EngineClient) -> None:
        await complete(client, [5], SHORT)

    with_client(test, "[time.sleep(6), FakeEngine()][1]", stuck_timeout_s=STUCK_S, step_timeout_s=STUCK_S)


def test_a_stopped_engine_does_not_hold_up_the_end() -> None:
    async def test(client: EngineClient) -> None:
        worker = process_of(client)
        os.kill(worker.pid, signal.SIGSTOP)
        started = time.monotonic()
        await client.stop(0.5)
        assert time.monotonic() - started < 25
        assert not worker.is_running()

    with_client(test)


def test_a_new_engine_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process or folder is available for a moment."""
    real, num_failed = module.private_folder, 0

    def full() -> Any:
        nonlocal num_failed
        num_failed += 1
        if num_failed <= 2:
            raise OSError(28, "No space left on device")
        return real()

    async def test(client: EngineClient) -> None:
        dead = process_of(client)
        monkeypatch.setattr(module, "private_folder", full)
        dead.kill()
        await until(lambda: not client.ready)
        await assert_serves_again(client, dead)
        assert num_failed == 3

    with_client(test)
