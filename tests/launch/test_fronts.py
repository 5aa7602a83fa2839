"""Several front ends behind one port: real processes, whose engines are fakes."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ConfigError
from hex_llm.launch import local
from tests.server.fakes import seconds_until_gone
from tests.test_serve import post, serving, start_fake, status_of

READY = r"listening on (\S+),[\s\S]*ready on"
BODY = {"prompt": [5], "max_tokens": 100, "ignore_eos": True}


@contextmanager
def several(load: str, num_replicas: int, num_fronts: int, **config: Any) -> Iterator[tuple[Any, str]]:
    """A server's process and its address; all that it started is gone in the end."""
    process = start_fake(load, num_replicas, api_server_count=num_fronts, **config)
    with serving(process, READY) as (address, lines):
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == num_replicas + num_fronts - 1
        yield process, address
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        seconds_until_gone(children)
    assert "Traceback" not in "".join(lines), "".join(lines)


def fronts_of(process: Any) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(process.pid).children():
        with suppress(psutil.Error):  # it has just ended
            found += [one] if "hex_llm.launch.child" in one.cmdline() else []
    return found


def number(address: str, name: str) -> float:
    text = httpx.get(f"{address}/metrics", timeout=60).raise_for_status().text
    return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))


def test_all_share_the_port_the_engines_and_their_numbers() -> None:
    with several("FakeEngine(step_s=0.005)", 2, 2) as (process, address):
        with ThreadPoolExecutor(24) as pool:
            replies = [one.result() for one in [pool.submit(post, address, BODY) for _ in range(48)]]
        assert {reply.status_code for reply in replies} == {200}
        assert {json.dumps(reply.json()["choices"][0]["token_ids"]) for reply in replies} == {
            json.dumps([5] * 100)
        }
        for _ in range(6):  # whoever is asked
            assert number(address, "vllm:generation_tokens_total") == 4800
            assert number(address, "vllm:request_success_total") == 48
            assert httpx.get(f"{address}/load").json() == {"server_load": 0}
            stats = httpx.get(f"{address}/stats").json()
            assert [one["state"] for one in stats["engines"]] == ["serving"] * 2
        # Not all of them came by one front end.
        assert all(sum(one.cpu_times()[:2]) > 0 for one in fronts_of(process))


@pytest.mark.slow
def test_a_front_end_that_dies_takes_its_own_requests_alone() -> None:
    with several("FakeEngine(step_s=0.01)", 1, 2, stuck_timeout=4) as (process, address):
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(post, address, {**BODY, "max_tokens": 300}) for _ in range(16)]
            while number(address, "vllm:num_requests_running") < 16:
                time.sleep(0.05)
            (child,) = fronts_of(process)
            child.kill()
            lost = [one for one in asked if one.exception() is not None]
            assert 0 < len(lost) < 16
            assert {one.result().status_code for one in asked if one not in lost} == {200}
        while not fronts_of(process) or fronts_of(process)[0].pid == child.pid:
            time.sleep(0.05)
        while number(address, "vllm:num_requests_running"):  # nobody generates for who has gone
            time.sleep(0.05)
        assert {post(address, {**BODY, "max_tokens": 3}).status_code for _ in range(12)} == {200}


@pytest.mark.slow
def test_a_front_end_that_is_stuck_is_replaced() -> None:
    with several("FakeEngine()", 1, 2, stuck_timeout=2) as (process, _):
        (child,) = fronts_of(process)
        child.suspend()
        while not (new := fronts_of(process)) or new[0].pid == child.pid:
            time.sleep(0.05)


def test_the_death_of_an_engine_is_told_to_all() -> None:
    with several("FakeEngine(step_s=0.01)", 2, 2, allow_restart=True) as (process, address):
        children = psutil.Process(process.pid).children()
        workers = [one for one in children if one not in fronts_of(process)]
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(post, address, {**BODY, "max_tokens": 200}) for _ in range(16)]
            while number(address, "vllm:time_to_first_token_seconds_count") < 16:
                time.sleep(0.05)
            workers[0].kill()
            codes = [one.result().status_code for one in asked]
        assert {*codes} == {200, 503}
        assert 4 <= codes.count(503) <= 12
        while number(address, "hex_llm:engine_serves") < 2:
            assert status_of(address) == 200
            time.sleep(0.05)
        assert {post(address, {**BODY, "max_tokens": 3}).status_code for _ in range(12)} == {200}
        assert httpx.post(f"{address}/admin/restart").status_code == 202
        while workers[1].is_running() or number(address, "hex_llm:engine_serves") < 2:
            assert post(address, {**BODY, "max_tokens": 3}).status_code == 200
            time.sleep(0.05)


@pytest.mark.parametrize("sign", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_all_end_together(sign: signal.Signals) -> None:
    """After SIGTERM when requests have ended, whichever front end has them."""
    with (
        several("FakeEngine(step_s=0.02)", 1, 2) as (process, address),
        ThreadPoolExecutor(12) as pool,
    ):
        asked = [pool.submit(post, address, BODY) for _ in range(12)]
        while number(address, "vllm:time_to_first_token_seconds_count") < 12:
            time.sleep(0.05)
        process.send_signal(sign)
        if sign == signal.SIGTERM:
            assert {one.result().status_code for one in asked} == {200}
            assert process.wait(30) == 0
        else:
            assert all(isinstance(one.exception(), httpx.HTTPError) for one in asked)
            process.wait(30)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than --max_concurrent_requests=2"):
        local.check_fronts(EngineConfig(max_concurrent_requests=2), ServerConfig(api_server_count=3))
    for name in ("allow_runtime_lora_updating", "enable_response_store"):
        with pytest.raises(ConfigError, match=name):
            ServerConfig(api_server_count=2, **{name: True})  # type: ignore[arg-type]
    sockets = local.bind_all(ServerConfig(host="127.0.0.1", port=0, api_server_count=2))
    port = sockets[0].getsockname()[1]
    assert sockets[1].getsockname()[1] == port
    with pytest.raises(ConfigError, match="already in use"):
        local.bind_all(ServerConfig(host="127.0.0.1", port=port, api_server_count=2))
    for one in sockets:
        one.close()
