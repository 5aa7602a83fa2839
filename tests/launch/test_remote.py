"""Replicas on other hosts: their stand-ins on the first one, real processes, with fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import zmq

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, EngineStopped
from hex_llm.frontend.client import EngineClient
from hex_llm.frontend.link import EngineLink
from hex_llm.ipc.children import private_folder
from hex_llm.ipc.protocol import Failed, Report, Start
from hex_llm.launch import remote
from hex_llm.launch.ray import free_port
from hex_llm.launch.remote import Lender, StandIn
from hex_llm.sampling_params import SamplingParams
from tests.frontend.clients import CONFIG, SHORT, complete, process_of, until, with_client
from tests.server.fakes import fake_worker

ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


@pytest.fixture
def config() -> EngineConfig:
    place = {"num_hosts": 2, "coordinator_address": f"127.0.0.1:{free_port(2)}"}
    return replace(CONFIG, data_parallel_size=2, cluster_key="a key that hosts share", **place)


@contextmanager
def lending(config: EngineConfig) -> Iterator[list[BaseException | None]]:
    """As on host 1; how it ended."""
    stopped, ends = threading.Event(), list[BaseException | None]()
    command = fake_worker("FakeEngine(step_s=0.01)")
    lender = Lender(replace(config, host_index=1), 1, {}, stopped, command)

    def run() -> None:
        try:
            ends.append(lender.run())  # type: ignore[func-returns-value]
        except BaseException as error:
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield ends
    finally:
        stopped.set()
        thread.join(30)
        assert not thread.is_alive()


def engines() -> list[psutil.Process]:
    """That were lent: children of this process, as those of the client are, but without a stand-in's name."""
    return [
        one for one in psutil.Process().children() if "FakeEngine(step_s=0.01)" in " ".join(one.cmdline())
    ]


@pytest.mark.slow  # eight processes start one after another
def test_a_replica_elsewhere_serves_dies_and_comes_back(config: EngineConfig) -> None:
    async def test(client: EngineClient) -> None:
        there = client.replicas[1]
        await until(lambda: there.serves)
        client.replicas[0].status.state = client.replicas[0].status.state.DRAINING
        assert (await complete(client, [7], SHORT)).outputs[0].token_ids == [7]
        for victim in ("engine", "stand-in"):
            asked = asyncio.create_task(complete(client, [5], ENDLESS))
            await until(lambda: there.status.num_steps > 3)
            (engine,) = engines()
            (engine if victim == "engine" else process_of(client, 1)).send_signal(signal.SIGKILL)
            with pytest.raises(EngineStopped):
                await asked
            await until(lambda: there.serves)
            assert not engine.is_running(), "with its stand-in it has ended"
            assert (await complete(client, [8], SHORT)).outputs[0].token_ids == [8]
        client.replicas[0].status.state = there.status.state
        (engine,) = engines()
        client.restart()
        while engine.is_running() or not there.serves:
            assert (await complete(client, [9], SHORT)).outputs[0].token_ids == [9]
            await asyncio.sleep(0.05)

    with lending(config) as ends:
        with_client(test, "FakeEngine()", config)
        assert not engines()
        assert not ends, "it waits whether host 0 begins again"


def hear(config: EngineConfig, *, is_again: bool = False) -> list[Report]:
    """What the stand-in of replica 1 tells until it ends."""

    async def run(folder: Path) -> list[Report]:
        link = EngineLink(folder)
        link.send(Start(config, 0, is_again=is_again))
        running = asyncio.create_task(asyncio.to_thread(StandIn(1, folder).run))
        told = []
        while not isinstance(report := await asyncio.wait_for(link.receive(), 30), Failed):
            told.append(report)
        await running
        link.close()
        return [*told, report]

    folder = private_folder()
    try:
        return asyncio.run(run(folder))
    finally:
        for file in folder.iterdir():
            file.unlink()
        os.rmdir(folder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block_size": 16}, "host 0 has --block_size=32, that of replica 1 --block_size=16"),
        ({"model": "a/b"}, "host 0 has --model=None, that of replica 1 --model=a/b"),
    ],
)
def test_hosts_that_disagree_are_told_in_what(config: EngineConfig, flags: dict, message: str) -> None:
    with lending(replace(config, **flags)) as ends:
        told = hear(config)[-1]
        assert told == Failed("ConfigError", f"the hosts disagree: {message}")
        while not ends:
            time.sleep(0.01)
    assert isinstance(ends[0], ConfigError)
    assert message in str(ends[0])


def test_who_has_another_key_is_nobody(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "JOIN_S", 1.5)
    plain = zmq.Context().socket(zmq.DEALER)
    plain.connect(f"tcp://127.0.0.1:{remote.port_of(config, 1)}")
    plain.send_multipart([remote.HELLO, b"{}"])
    with lending(replace(config, cluster_key="a key of somebody else")) as ends:
        told = hear(config)[-1]
        while not ends:
            time.sleep(0.01)
    plain.context.destroy(linger=0)
    assert told == Failed(
        "ConfigError", "the host of replica 1 did not come within 2 s, or has another --cluster_key"
    )
    assert "no answer for replica 1 within 2 s" in str(ends[0])
