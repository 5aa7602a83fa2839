"""The engine's thread with a fake engine, and `hex-llm serve` as a real process."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ConfigError, InvalidRequest, ModelError
from hex_llm.launch import local
from hex_llm.launch.engine_thread import EngineStopped, EngineThread
from hex_llm.types import FinishReason, SamplingParams
from tests.server.fakes import EOS, FakeLLM, byte_tokenizer

ROOT = Path(__file__).parent.parent
LONG = SamplingParams(max_tokens=None)


# ---- the engine's thread


def with_thread(llm: FakeLLM, test: Callable[[EngineThread], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = EngineThread(lambda: llm, "fake")
        assert not engine.ready
        await engine.start()
        assert engine.ready
        try:
            await asyncio.wait_for(test(engine), 10)
        finally:
            llm.engine.may_step.set()
            assert engine.stop(10)

    asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_requests_are_answered_from_one_other_thread() -> None:
    llm = FakeLLM()

    async def test(engine: EngineThread) -> None:
        assert (engine.max_len, engine.tokenizer) == (64, llm.tokenizer)
        outputs = await asyncio.gather(
            engine.generate([5, 6], LONG), engine.generate([7, 8, 9], SamplingParams(max_tokens=2))
        )
        assert [(o.token_ids, o.finish_reason) for o in outputs] == [
            ([6, 5, EOS], FinishReason.STOP),
            ([9, 8], FinishReason.LENGTH),
        ]
        steps = llm.engine.num_steps
        await asyncio.sleep(0.05)
        assert llm.engine.num_steps == steps == 5, "it steps with nothing to do"

    with_thread(llm, test)
    assert len(llm.engine.threads) == 1
    assert threading.get_ident() not in llm.engine.threads


def test_a_bad_request_fails_alone() -> None:
    async def test(engine: EngineThread) -> None:
        good, bad = await asyncio.gather(
            engine.generate([5], LONG), engine.generate([], LONG), return_exceptions=True
        )
        assert isinstance(bad, InvalidRequest)
        assert good.token_ids == [5, EOS]

    with_thread(FakeLLM(), test)


@pytest.mark.parametrize("idle", [False, True])
def test_a_failing_step_fails_every_request(idle: bool) -> None:
    llm = FakeLLM()
    llm.engine.may_step.clear()

    async def test(engine: EngineThread) -> None:
        requests = [asyncio.create_task(engine.generate([i], LONG)) for i in (5, 6, 7)]
        await until(lambda: llm.engine.num_steps)
        llm.engine.idle, llm.engine.error = idle, None if idle else RuntimeError("device lost")
        llm.engine.may_step.set()
        for outcome in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(outcome, EngineStopped)
        assert not engine.ready
        with pytest.raises(EngineStopped, match="RuntimeError"):
            await engine.generate([5], LONG)

    with_thread(llm, test)


def test_a_cancelled_request_is_dropped_while_it_waits() -> None:
    llm = FakeLLM()
    llm.engine.may_step.clear()

    async def test(engine: EngineThread) -> None:
        first, second, third = (asyncio.create_task(engine.generate([i], LONG)) for i in (5, 6, 7))
        await until(lambda: llm.engine.num_steps)
        for gone in (first, second):  # one runs, one waits
            gone.cancel()
        await asyncio.sleep(0)
        llm.engine.may_step.set()
        assert (await third).token_ids == [7, EOS]
        assert llm.engine.num_steps == 4  # two for the first, none for the second

    with_thread(llm, test)


def test_shutting_down_answers_every_request() -> None:
    llm = FakeLLM()
    llm.engine.may_step.clear()

    async def test(engine: EngineThread) -> None:
        request = asyncio.create_task(engine.generate([5], LONG))
        await until(lambda: llm.engine.num_steps)
        engine.fail("the server is shutting down")
        with pytest.raises(EngineStopped, match="shutting down"):
            await request

    with_thread(llm, test)


def test_a_failure_to_load_is_raised() -> None:
    def load() -> Any:
        raise ModelError("no such model")

    engine = EngineThread(load, "fake")
    with pytest.raises(ModelError, match="no such model"):
        asyncio.run(engine.start())
    assert not engine.ready
    assert engine.stop(10)


# ---- launching


def test_a_taken_port_is_named() -> None:
    with local.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port}: .* already in use"):
            local.bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["256.0.0.1", "a..b", "no.such.host.invalid"])
def test_a_wrong_host_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"--host={host}"):
        local.bind(host, 0)


@pytest.mark.parametrize(
    ("tokenizer", "body"),
    [
        (byte_tokenizer(), {"messages": [{"role": "user", "content": "What is the capital of France?"}]}),
        (byte_tokenizer(None), {"prompt": "The capital of France is"}),
        (None, {"prompt": [1, 2, 3]}),
    ],
)
def test_the_banner_has_a_line_to_paste(tokenizer: Any, body: dict[str, Any]) -> None:
    llm = FakeLLM()
    llm.tokenizer = tokenizer

    async def test(engine: EngineThread) -> None:
        banner = local.banner(engine, ServerConfig(api_key="secret"), "http://0.0.0.0:7080")
        assert "http://0.0.0.0:7080\n" in banner
        assert "fake" in banner
        assert "secret" not in banner
        (line,) = re.findall("curl .*", banner)
        assert line.startswith("curl http://localhost:7080/v1/")
        assert json.loads(line.split("'")[1]) == body

    with_thread(llm, test)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (ModelError("no such model"), "no such model"),
        (RuntimeError("a\nb"), "the server failed: RuntimeError: a b"),
    ],
)
def test_a_failure_to_load_ends_the_server(
    problem: Exception, message: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(_: EngineConfig) -> Any:
        raise problem

    monkeypatch.setattr(local, "load", load)
    monkeypatch.setattr(local, "configure_logging", lambda _: None)
    caplog.set_level(logging.DEBUG, "hex_llm")
    with pytest.raises(ModelError) as caught:
        local.serve(EngineConfig(), ServerConfig(host="127.0.0.1", port=0))
    assert str(caught.value) == message
    (record,) = (record for record in caplog.records if record.exc_info)
    assert record.levelno == logging.DEBUG  # the traceback: shown by --verbose_log only


# ---- the real process


def run(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start(*argv: str) -> subprocess.Popen[str]:
    module = "hex_llm.server.api_server"
    return run([sys.executable, "-m", module, "--host=127.0.0.1", "--no-warmup", *argv])


def start_stuck(drain_s: int) -> subprocess.Popen[str]:
    """A server whose requests are never answered."""
    script = (
        "from hex_llm.config import *; from hex_llm.launch import local; from tests.server.fakes import *;"
        "llm = FakeLLM(); llm.engine.may_step.clear(); local.load = lambda _: llm;"
        f"local.DRAIN_S = {drain_s}; local.STOP_S = 1;"
        "local.serve(EngineConfig(), ServerConfig(host='127.0.0.1', port=0))"
    )
    return run([sys.executable, "-c", script])


@contextmanager
def serving(process: subprocess.Popen[str]) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and the lines that it has written so far."""
    lines: list[str] = []
    assert process.stdout is not None
    try:
        while not (found := re.search(r"listening on (\S+),", "".join(lines))):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        yield found[1], lines
        reader.join(10)
    finally:
        process.kill()
        process.wait()


def status_of(address: str) -> int:
    return httpx.get(f"{address}/health", timeout=60).status_code


def test_the_default_model_is_served_and_shut_down() -> None:
    process = start("--port=0", "--max_model_len=256", "--num_blocks=32", "--api-key=sesame")
    with serving(process) as (address, lines):
        assert status_of(address) == 503
        while status_of(address) == 503:
            time.sleep(0.1)
            assert process.poll() is None, "".join(lines)
        client = httpx.Client(base_url=address, headers={"authorization": "Bearer sesame"}, timeout=300)
        question = {"role": "user", "content": "What is the capital of France?"}
        reply = client.post("/v1/chat/completions", json={"messages": [question]}).json()
        assert reply["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == 8

        with ThreadPoolExecutor() as pool:
            body = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True}
            late = pool.submit(client.post, "/v1/completions", json=body)
            time.sleep(1)  # it has come in by then, and is answered all the same
            process.send_signal(signal.SIGTERM)
            assert late.result().json()["usage"]["completion_tokens"] == 32
        assert process.wait(60) == 0
    written = "".join(lines)
    assert f"hex_llm is ready on {address}\n" in written
    assert not re.search("sesame|Once upon|Traceback", written)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_loads_can_be_shut_down(stop: signal.Signals) -> None:
    process = start("--port=0")
    with serving(process) as (address, lines):
        assert status_of(address) == 503
        process.send_signal(stop)
        assert process.wait(30) == 0
    assert "Traceback" not in "".join(lines)


@pytest.mark.parametrize(("drain_s", "num_signals"), [(1, 1), (60, 2)])
def test_requests_are_not_waited_for_for_ever(drain_s: int, num_signals: int) -> None:
    process = start_stuck(drain_s)
    with serving(process) as (address, lines):
        while status_of(address) == 503:
            time.sleep(0.1)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(httpx.post, f"{address}/v1/completions", json={"prompt": "a"}, timeout=60)
            for _ in range(num_signals):
                time.sleep(1)
                process.send_signal(signal.SIGTERM)
            assert (asked.result().status_code, process.wait(30)) == (503, 0)
    assert "Traceback" not in "".join(lines)


def test_a_missing_model_ends_the_process_with_one_line(tmp_path: Path) -> None:
    process = start("--port=0", "--log_level=ERROR", f"--model={tmp_path / 'none'}")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"error: .*none.*\n", output)


def test_a_taken_port_ends_the_process_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(f"--port={port}")
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == f"error: --host=127.0.0.1 --port={port}: cannot listen there: Address already in use\n"


def test_others_log_only_warnings() -> None:
    script = (
        "import logging; from hex_llm.config import ServerConfig; from hex_llm.launch.local import *; "
        "configure_logging(ServerConfig(log_level='DEBUG')); "
        "print(*(logging.getLogger(n).getEffectiveLevel() for n in ('hex_llm.x', 'uvicorn.access', 'httpx')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(level) for level in (logging.DEBUG, logging.DEBUG, logging.WARNING)]
