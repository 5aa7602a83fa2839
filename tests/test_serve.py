"""`hex-llm serve`, as real processes."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.fakes import FAILS_TO_STEP, HANGS, seconds_until_gone
from tests.tiny import FAMILIES, greedy_tokens

ROOT = Path(__file__).parent.parent


def run(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def start(*argv: str) -> subprocess.Popen[str]:
    module = "hex_llm.server.api_server"
    return run([sys.executable, "-m", module, "--host=127.0.0.1", "--no-warmup", *argv])


def start_fake(load: str, num_replicas: int = 1, **config: Any) -> subprocess.Popen[str]:
    """A server whose engines are fake ones, in real processes; `config` are fields of ServerConfig."""
    script = (
        "from hex_llm.config import *; from hex_llm.launch import local; from tests.server.fakes import *;"
        "Client = local.EngineClient;"
        f"local.EngineClient = lambda config, name: Client(config, name, fake_worker({load!r}));"
        "local.STOP_S = 1;"
        f"config = ServerConfig(host='127.0.0.1', port=0, **{config!r});"
        f"local.serve(EngineConfig(skip_tokenizer_init=True, data_parallel_size={num_replicas}), config)"
    )
    return run([sys.executable, "-c", script])


def await_ready(process: subprocess.Popen[str], address: str) -> list[psutil.Process]:
    """Its child processes, which must be gone in the end."""
    while status_of(address) == 503:
        time.sleep(0.05)
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    return children


@contextmanager
def serving(
    process: subprocess.Popen[str], listening: str = r"listening on (\S+),"
) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and the lines that it has written so far."""
    lines: list[str] = []
    assert process.stdout is not None
    try:
        while not (found := re.search(listening, "".join(lines))):
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


def await_first_tokens(address: str, num_requests: int, client: Any = httpx) -> None:
    """Until so many requests have had one."""
    counted = rf"vllm:time_to_first_token_seconds_count\S* {num_requests}\.0"
    while not re.search(counted, client.get(f"{address}/metrics", timeout=60).raise_for_status().text):
        time.sleep(0.05)


@pytest.mark.slow  # tests/test_readme.py serves it too
def test_the_default_model_is_served_and_shut_down() -> None:
    process = start("--port=0", "--max_model_len=256", "--num_blocks=32", "--api-key=sesame")
    with serving(process) as (address, lines):
        assert status_of(address) == 503
        while status_of(address) == 503:
            time.sleep(0.1)
            assert process.poll() is None, "".join(lines)
        client = httpx.Client(base_url=address, headers={"authorization": "Bearer sesame"}, timeout=300)
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"messages": [question], "temperature": 0}
        reply = client.post("/v1/chat/completions", json=body).json()
        assert reply["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["completion_tokens"] == 8

        with ThreadPoolExecutor() as pool:
            body = {"prompt": "Once upon a time", "max_tokens": 32, "ignore_eos": True, "temperature": 0}
            late = pool.submit(client.post, "/v1/completions", json=body)
            await_first_tokens(address, 2, client)  # it has come in by then, and is answered all the same
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


@pytest.mark.parametrize(("drain_s", "num_signals"), [(1, 1), pytest.param(60, 2, marks=pytest.mark.slow)])
def test_requests_are_not_waited_for_for_ever(drain_s: int, num_signals: int) -> None:
    process = start_fake("FakeEngine()", drain_timeout=drain_s)
    with serving(process) as (address, lines):
        children = await_ready(process, address)
        with ThreadPoolExecutor() as pool:
            body = {"prompt": [HANGS], "max_tokens": 5}
            asked = pool.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=60)
            for _ in range(num_signals):
                time.sleep(1)
                process.send_signal(signal.SIGTERM)
            assert (asked.result().status_code, process.wait(30)) == (503, 0)
        seconds_until_gone(children)
    assert "Traceback" not in "".join(lines)


def test_a_server_that_drains_turns_new_requests_away() -> None:
    process = start_fake("FakeEngine(step_s=0.05)", log_format="json")
    with serving(process, r'listening on ([^" ]+),') as (address, lines):
        children = await_ready(process, address)
        with ThreadPoolExecutor() as pool:
            body = {"prompt": [5], "max_tokens": 60, "ignore_eos": True}
            asked = pool.submit(post, address, body)
            await_first_tokens(address, 1)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            for reply in (post(address, body), httpx.get(f"{address}/health")):
                assert (reply.status_code, "shutting down" in reply.text) == (503, True)
                assert int(reply.headers["retry-after"]) > 0
            assert asked.result().json()["usage"]["completion_tokens"] == 60
        assert process.wait(10) == 0
        seconds_until_gone(children)
    written = [json.loads(line) for line in lines if line.startswith("{")]
    done = [one for one in written if one["message"] == "request" and one.get("status") == 200]
    assert [(one["route"], one["prompt_tokens"], one["output_tokens"]) for one in done] == [
        ("/v1/completions", 1, 60)
    ]
    assert 0 < done[0]["ttft_s"] < done[0]["total_s"]


def test_a_stream_that_is_not_waited_for_ends_with_an_error() -> None:
    process = start_fake("FakeEngine(step_s=0.05)", drain_timeout=1)
    with serving(process) as (address, lines):
        await_ready(process, address)
        body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
            parts = reply.iter_lines()
            assert next(parts).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            *_, error, _, done, _ = parts
        assert "shutting down" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert process.wait(10) == 0
    assert "Traceback" not in "".join(lines)


def test_an_engine_that_hangs_is_unhealthy() -> None:
    process = start_fake("FakeEngine()", health_timeout=3, step_timeout=0)
    with serving(process) as (address, _):
        await_ready(process, address)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json={"prompt": [HANGS]}, timeout=0.5)
        assert status_of(address) == 200
        time.sleep(3)
        assert status_of(address) == 503


def test_an_engine_that_is_stopped_is_replaced_and_its_streams_end() -> None:
    process = start_fake("FakeEngine(step_s=0.05)", stuck_timeout=3)
    with serving(process) as (address, lines):
        (worker,) = await_ready(process, address)
        body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as reply:
            parts = reply.iter_lines()
            assert next(parts).startswith("data: ")
            worker.suspend()
            started = time.monotonic()
            *_, error, _, done, _ = parts
        assert time.monotonic() - started < 3 + 5
        assert "has failed" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        assert "being restarted" in httpx.get(f"{address}/health").text
        await_ready(process, address)
        assert post(address, {"prompt": [5], "max_tokens": 3}).status_code == 200
        seconds_until_gone([worker])
    assert "no sign of life" in "".join(lines)


def test_a_stopped_engine_does_not_outlive_its_server() -> None:
    process = start_fake("FakeEngine()")
    with serving(process) as (address, _):
        children = await_ready(process, address)
        for child in children:
            child.suspend()
        process.kill()
        assert seconds_until_gone(children) < 10


@pytest.mark.slow
def test_a_stopped_engine_does_not_hold_up_sigterm() -> None:
    process = start_fake("FakeEngine()")
    with serving(process) as (address, _):
        children = await_ready(process, address)
        for child in children:
            child.suspend()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        seconds_until_gone(children)


def test_numbers_of_a_running_server() -> None:
    process = start_fake("FakeEngine()")
    with serving(process) as (address, _):
        await_ready(process, address)
        post(address, {"prompt": [5, 6], "max_tokens": 3})
        text = httpx.get(f"{address}/metrics").text
        for line in (
            'vllm:generation_tokens_total{model_name="SmolLM2-135M-Instruct"} 3.0',
            'vllm:request_success_total{finished_reason="stop",model_name="SmolLM2-135M-Instruct"} 1.0',
            'vllm:kv_cache_usage_perc{engine="0",model_name="SmolLM2-135M-Instruct"} 0.25',
            'vllm:time_to_first_token_seconds_count{model_name="SmolLM2-135M-Instruct"} 1.0',
        ):
            assert line in text
        assert httpx.get(f"{address}/stats").json()["kv_usage"] == 0.25


@pytest.mark.parametrize("sign", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_running_requests_are_finished_when_all_processes_get_the_signal(sign: signal.Signals) -> None:
    """As a terminal and a supervisor send them."""
    process = start_fake("FakeEngine(step_s=0.02)")
    with serving(process) as (address, lines):
        children = await_ready(process, address)
        with ThreadPoolExecutor() as pool:
            body = {"prompt": [5], "max_tokens": 100, "ignore_eos": True}
            asked = [pool.submit(post, address, body) for _ in range(5)]
            await_first_tokens(address, 5)
            for child in children:
                child.send_signal(sign)
            process.send_signal(sign)
            for one in asked:
                assert one.result().json()["usage"]["completion_tokens"] == 100
        assert process.wait(10) == 0
        seconds_until_gone(children)
    assert "Traceback" not in "".join(lines)


def post(address: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{address}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("fault", ["killed", pytest.param("step", marks=pytest.mark.slow)])
def test_the_engines_death_is_told_to_everyone(fault: str) -> None:
    process = start_fake("FakeEngine(step_s=0.01)")
    with serving(process) as (address, _):
        (worker,) = await_ready(process, address)
        with ThreadPoolExecutor() as pool:
            body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True}
            asked = [pool.submit(post, address, body) for _ in range(5)]
            await_first_tokens(address, 5)
            started = time.monotonic()
            if fault == "killed":
                worker.kill()
            else:
                asked.append(pool.submit(post, address, {"prompt": [FAILS_TO_STEP]}))
            replies = [one.result() for one in asked]
        assert time.monotonic() - started < 25
        assert {reply.status_code for reply in replies} == {503}
        assert not any("0x7f" in reply.text for reply in replies)
        assert status_of(address) == 503
        await_ready(process, address)  # it is started again
        assert post(address, {"prompt": [5], "max_tokens": 3}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_replicas_die_alone_and_are_restarted_in_turn() -> None:
    process = start_fake("FakeEngine(step_s=0.01)", 2, allow_restart=True)
    with serving(process, r"listening on (\S+),[\s\S]*ready on") as (address, _):
        workers = await_ready(process, address)
        assert len(workers) == 2

        def states() -> list[str]:
            return [one["state"] for one in httpx.get(f"{address}/stats").json()["engines"]]

        with ThreadPoolExecutor() as pool:
            body = {"prompt": [5], "max_tokens": 150, "ignore_eos": True}
            asked = [pool.submit(post, address, body) for _ in range(4)]
            await_first_tokens(address, 4)
            workers[0].kill()
            assert sorted(one.result().status_code for one in asked) == [200, 200, 503, 503]
            assert status_of(address) == 200
            while states() != ["serving", "serving"]:
                time.sleep(0.05)
            asked = [pool.submit(post, address, body) for _ in range(4)]
            assert httpx.post(f"{address}/admin/restart").status_code == 202
            assert "already" in httpx.post(f"{address}/admin/restart").json()["error"]["message"]
            assert {one.result().status_code for one in asked} == {200}
            while states() != ["serving", "serving"] or workers[1].is_running():
                assert post(address, {"prompt": [5], "max_tokens": 3}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_restart_must_be_allowed() -> None:
    process = start_fake("FakeEngine()")
    with serving(process) as (address, _):
        await_ready(process, address)
        assert httpx.post(f"{address}/admin/restart").status_code == 404


def test_more_replicas_than_devices_are_refused_in_one_line() -> None:
    process = start("--port=0", "--data_parallel_size=5", "--tensor_parallel_size=2")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.fullmatch(r"error: --data_parallel_size=5: 10 devices are needed, .* 8 cpu .*\n", output)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_killed_server_takes_its_engines_along(num_replicas: int) -> None:
    process = start_fake("FakeEngine(step_s=0.01)", num_replicas)
    with serving(process, r"listening on (\S+),[\s\S]*ready on") as (address, _):
        children = await_ready(process, address)
        assert len(children) == num_replicas
        process.kill()
        assert seconds_until_gone(children) < 10


def test_a_client_that_leaves_frees_the_engine(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    process = start_fake(f"FakeEngine(Path({str(journal)!r}), step_s=0.01)")
    with serving(process) as (address, _):
        await_ready(process, address)
        body = {"prompt": [5], "max_tokens": 4000, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/completions", json=body, timeout=0.5)
        while "idle" not in journal.read_text():
            time.sleep(0.01)
        assert journal.read_text().split() == ["add", "abort", "idle"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    "flags",
    [(), pytest.param(("--data_parallel_size=2", "--tensor_parallel_size=2"), marks=pytest.mark.slow)],
)
def test_a_tiny_model_is_served(flags: tuple[str, ...], tmp_path: Path) -> None:
    """All of it: real processes, a real model, judged by transformers' greedy search."""
    tiny = next(one for one in FAMILIES if one.name == "llama3")
    model = tiny.save(tmp_path)
    process = start("--port=0", f"--model={tmp_path}", "--skip_tokenizer_init", "--num_blocks=64", *flags)
    with serving(process, r"listening on (\S+),[\s\S]*ready on") as (address, lines):
        await_ready(process, address)
        prompts = [tiny.prompt(seed) for seed in range(4)]
        body = {"prompt": prompts, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        reply = post(address, body).json()
        expected = [greedy_tokens(model, prompt, 12) for prompt in prompts]
        assert [choice["token_ids"] for choice in reply["choices"]] == expected, "".join(lines)
        for choice in reply["choices"]:
            assert len(choice["logprobs"]["token_logprobs"]) == 12
            assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 12
        steps = re.findall(r"hex_llm:engine_steps_total{\S*} (\S+)", httpx.get(f"{address}/metrics").text)
        assert len(steps) == (2 if flags else 1)
        assert min(map(float, steps)) > 0  # each had a part in it
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


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


@pytest.mark.slow
def test_conversations_find_what_is_cached_though_there_are_two_replicas(tmp_path: Path) -> None:
    """Fifty at a time, of six turns each: at least nine tenths of one replica's prefix hits."""
    tiny = next(one for one in FAMILIES if one.name == "llama3")
    replace(tiny, changes={**tiny.changes, "max_position_embeddings": 1024}).save(tmp_path)

    def rate(*flags: str) -> float:
        process = start(
            "--port=0", f"--model={tmp_path}", "--skip_tokenizer_init", "--num_blocks=1600", *flags
        )
        with (
            serving(process, r"listening on (\S+),[\s\S]*ready on") as (address, _),
            ThreadPoolExecutor(50) as pool,
        ):
            list(pool.map(lambda number: converse(address, number), range(50)))
            stats = httpx.get(f"{address}/stats", timeout=60).json()
            assert all(one["prefix_hit_rate"] for one in stats["engines"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        return float(stats["prefix_hit_rate"])

    alone, two = rate(), rate("--data_parallel_size=2")
    print(f"prefix hits: {alone:.3f} of one replica, {two:.3f} of two")
    assert alone > 0.5
    assert two >= 0.9 * alone


def converse(address: str, number: int) -> None:
    draw = random.Random(number)
    talk = random.Random(0).choices(range(3, 120), k=64) + draw.choices(range(3, 120), k=40)
    for _ in range(6):
        body = {"prompt": talk, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{address}/v1/completions", json=body, timeout=300).raise_for_status().json()
        talk = talk + reply["choices"][0]["token_ids"] + draw.choices(range(3, 120), k=60)
