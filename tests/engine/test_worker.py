"""The worker as a real process, driven over its sockets; its engine is a fake."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from hex_llm.config import EngineConfig
from hex_llm.ipc.protocol import (
    MAX_COMMAND,
    Abort,
    Add,
    Beat,
    Command,
    Failed,
    Reader,
    Ready,
    Refused,
    Report,
    Shutdown,
    Start,
    Step,
    Stop,
    command_address,
    encode,
    report_address,
    set_limits,
)
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import FinishReason, Request, Update
from tests.server.fakes import EOS, FAILS_TO_ADD, FAILS_TO_STEP, LIMITS, fake_worker, seconds_until_gone

TIMEOUT_MS = 20_000


class Running:
    """A worker and the front end's sockets."""

    def __init__(self, load: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hex_llm-"))
        self.context = zmq.Context()
        self.inbox, self.outbox = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        for one in (self.inbox, self.outbox):
            set_limits(one, 1 << 30)
        self.inbox.bind(report_address(self.folder))
        self.outbox.connect(command_address(self.folder))
        self.reader: Reader[Report] = Reader(Report)
        self.process = subprocess.Popen(
            [*fake_worker(load), str(self.folder)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.send(Start(EngineConfig(), 20))

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.outbox.send(encode(command))

    def next(self) -> Any:
        """The next report but beats."""
        while True:
            assert self.inbox.poll(TIMEOUT_MS), "no report"
            report = self.reader.decode(self.inbox.recv())
            assert report is not None
            if not isinstance(report, Beat):
                return report

    def until_end(self, request_id: str) -> list[Update]:
        """The updates of one request; it has one choice."""
        found: list[Update] = []
        while not found or found[-1].finish_reason is None:
            report = self.next()
            assert isinstance(report, Step), report
            found += [update for update in report.updates if update.request_id == request_id]
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[Running]:
    running = Running(getattr(request, "param", "FakeEngine()"))
    yield running
    running.close()


def request(request_id: str, *prompt_ids: int, **params: Any) -> Add:
    return Add(Request(request_id, list(prompt_ids), SamplingParams(**params)))


def test_requests_are_served_and_the_worker_ends(worker: Running) -> None:
    assert worker.next() == Ready(LIMITS, "memory: none")
    worker.send(request("a", 5, 6, max_tokens=10))
    updates = worker.until_end("a")
    assert [update.token_ids for update in updates] == [[6], [5], [EOS]]
    assert updates[-1].finish_reason is FinishReason.STOP
    worker.send(Shutdown())
    assert worker.process.wait(10) == 0


# An engine that tells how many objects are never looked at again.
KEEPING = (
    "type('_', (FakeEngine,), {'memory': property(lambda _: str(__import__('gc').get_freeze_count()))})()"
)


@pytest.mark.parametrize("worker", [KEEPING], indirect=True)
def test_what_was_loaded_is_not_searched_for_garbage(worker: Running) -> None:
    """Between steps that would take as long as many of them."""
    assert int(worker.next().memory) > 10_000


@pytest.mark.parametrize("worker", ["FakeEngine(step_s=0.05)"], indirect=True)
def test_each_step_is_one_message(worker: Running) -> None:
    worker.next()
    worker.send(*(request(str(i), 5, 6, 7, max_tokens=10) for i in range(20)))
    steps = [worker.next() for _ in range(4)]
    assert [step.num_steps for step in steps] == [1, 2, 3, 4]
    assert sum(len(step.updates) for step in steps[1:]) >= 3 * 19  # the first may have come before the others


@pytest.mark.parametrize("worker", ["FakeEngine(step_s=0.05)"], indirect=True)
def test_a_step_tells_all_of_its_time_and_not_that_of_being_idle(worker: Running) -> None:
    worker.next()
    time.sleep(0.5)
    worker.send(request("a", 5, 6, 7, max_tokens=10))
    steps = [worker.next() for _ in range(4)]
    assert all(0.05 <= step.stats.rest_s < 0.4 for step in steps)  # this engine has no phases of its own


@pytest.mark.parametrize("worker", ["FakeEngine(patience_s=0.5)"], indirect=True)
def test_who_comes_while_the_engine_has_patience_is_in_the_next_step(worker: Running) -> None:
    worker.next()
    worker.send(request("a", 5, 6, 7, max_tokens=10))
    assert [update.request_id for update in worker.next().updates] == ["a"]
    time.sleep(0.2)
    worker.send(request("b", 5, max_tokens=1))
    step = worker.next()
    assert {update.request_id for update in step.updates} == {"a", "b"}
    assert 0.4 < step.stats.wait_s < 0.6, "for the devices"
    assert step.stats.rest_s < 0.2


def test_an_idle_worker_waits(worker: Running) -> None:
    worker.next()
    worker.send(request("a", 5, max_tokens=1))
    worker.until_end("a")
    process = psutil.Process(worker.process.pid)
    before = process.cpu_times()
    time.sleep(1)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
    worker.send(request("b", 5, max_tokens=1))
    assert worker.next().num_steps == 2


def test_aborts_and_stops_reach_the_engine(worker: Running) -> None:
    worker.next()
    worker.send(request("a", 5, max_tokens=None, ignore_eos=True), Abort("a"), Abort("never was"))
    assert worker.until_end("a")[-1].finish_reason is FinishReason.ABORT
    worker.send(request("b", 5, max_tokens=None, ignore_eos=True), Stop("b", 0), Stop("b", 0), Stop("no", 1))
    assert worker.until_end("b")[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("worker", ["FakeEngine(max_requests=1, step_s=0.01)"], indirect=True)
def test_a_request_that_cannot_be_added_fails_alone(worker: Running) -> None:
    worker.next()
    long = request("long", 5, max_tokens=100, ignore_eos=True)
    bad = [request("bad", LIMITS.vocab_size), request("odd", FAILS_TO_ADD), request("more", 5)]
    worker.send(long, *bad)
    found: list[Any] = []
    while not any(isinstance(one, Step) and one.updates[-1].finish_reason for one in found):
        found.append(worker.next())
    refused = [(one.request_id, one.kind, one.param) for one in found if isinstance(one, Refused)]
    assert refused == [
        ("bad", "InvalidRequest", "prompt"),
        ("odd", "HexError", None),
        ("more", "QueueFull", None),
    ]
    assert not any("0x7fff" in one.message for one in found if isinstance(one, Refused))
    assert sum(len(one.updates) for one in found if isinstance(one, Step)) == 100


def test_a_failing_step_is_told_and_ends_the_worker(worker: Running) -> None:
    worker.next()
    worker.send(request("a", FAILS_TO_STEP), request("b", 5))
    while not isinstance(report := worker.next(), Failed):
        pass
    assert report == Failed("RuntimeError", "device lost at 0x7fffdeadbeef")
    _, errors = worker.process.communicate(timeout=10)
    assert worker.process.returncode == 1
    assert "Traceback" in errors


@pytest.mark.parametrize("worker", ["fail(SourceError('no such model'))"], indirect=True)
def test_a_failure_to_load_is_told(worker: Running) -> None:
    assert worker.next() == Failed("SourceError", "no such model")
    _, errors = worker.process.communicate(timeout=10)
    assert (worker.process.returncode, errors) == (1, "")


def test_a_second_start_is_ignored(worker: Running) -> None:
    worker.next()
    worker.send(Start(EngineConfig(), 20), request("a", 5, max_tokens=1))
    assert len(worker.until_end("a")) == 1


# ---- frames from elsewhere


def test_malformed_frames_harm_nobody(worker: Running, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Touch:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {canary}",)

    worker.next()
    before = psutil.Process(worker.process.pid).memory_info().rss
    worker.send(request("a", 5, 6, max_tokens=4000, ignore_eos=True))
    draw = random.Random(1)
    stranger = worker.context.socket(zmq.PUSH)
    stranger.set(zmq.SNDHWM, 0)
    stranger.connect(command_address(worker.folder))
    whole = encode(request("x", 5, 6))
    for _ in range(2500):
        stranger.send(draw.randbytes(draw.randint(0, 300)))
        stranger.send(whole[: draw.randrange(len(whole))])
        stranger.send_multipart([b"", pickle.dumps(Touch())])
    assert [update.token_ids for update in worker.until_end("a")] == [[6], [5]] * 2000
    worker.send(request("b", 7, max_tokens=1))
    assert worker.until_end("b")[-1].token_ids == [7]
    assert psutil.Process(worker.process.pid).memory_info().rss - before < 64 << 20
    assert not canary.exists()
    stranger.close(linger=0)


def test_a_frame_that_is_too_large_is_refused(worker: Running) -> None:
    worker.next()
    before = psutil.Process(worker.process.pid).memory_info().rss
    stranger = worker.context.socket(zmq.PUSH)
    stranger.connect(command_address(worker.folder))
    stranger.send(bytes(MAX_COMMAND + 1))
    time.sleep(0.5)
    worker.send(request("a", 5, max_tokens=1))
    assert worker.until_end("a")[-1].token_ids == [5]
    assert psutil.Process(worker.process.pid).memory_info().rss - before < 16 << 20
    stranger.close(linger=0)


# ---- signals and the parent's death


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_the_front_ends_business(worker: Running, sign: signal.Signals) -> None:
    worker.next()
    worker.process.send_signal(sign)
    time.sleep(0.2)
    worker.send(request("a", 5, max_tokens=1))
    assert worker.until_end("a")[-1].token_ids == [5]


@pytest.mark.parametrize("load", ["FakeEngine(step_s=0.01)", "time.sleep(600)", "FakeEngine(step_s=600)"])
def test_a_worker_does_not_outlive_its_parent(load: str) -> None:
    """Whether it steps, loads or hangs when its parent is killed; nothing is left in the file system."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, load], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    worker = psutil.Process(int(pid))
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    parent.kill()
    parent.wait()
    assert seconds_until_gone([worker]) < 10
    assert not Path(folder).exists()


PARENT = """
import asyncio, sys
from hex_llm.config import EngineConfig
from hex_llm.frontend.client import EngineClient
from tests.frontend.clients import complete
from tests.server.fakes import *

async def run():
    client = EngineClient(EngineConfig(skip_tokenizer_init=True), command=fake_worker(sys.argv[1]))
    starting = asyncio.create_task(client.start())
    supervisor = client.replicas[0].supervisor
    while supervisor.process is None or not supervisor.process.is_running:
        await asyncio.sleep(0.01)
    if "FakeEngine" in sys.argv[1]:
        await starting
        asyncio.create_task(complete(client, [5], SamplingParams(max_tokens=None, ignore_eos=True)))
        await asyncio.sleep(0.1)
    else:
        await asyncio.sleep(1)
    print(supervisor.process.pid, supervisor.process.folder, flush=True)
    await asyncio.sleep(600)

asyncio.run(run())
"""
