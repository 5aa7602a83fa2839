"""Every curl command of the README, as it stands there, against a real server with the default model."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hex_llm.bench.arguments import client_parser, parse_client
from hex_llm.cli import main
from tests.test_serve import ROOT, await_ready, serving, start
from tools.newcomer import commands

BLOCKS = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
COMMANDS = [one.strip() for block in BLOCKS for one in re.split(r"\n(?=curl )", block) if one[:4] == "curl"]
# What an answer must have in it, in the order of the commands.
SENSIBLE = [
    "The capital of France is Paris.",
    '"completion_tokens":',
    '"stop_reason":"',
    '"object":"embedding"',
    '"results":[{"index":0,',
    " Paris",
    "What is a car?\\nOutput:\\nA car is a vehicle",
    '"finish_reason":"stop_sequence"',
    '"name":"thermometer","arguments":',
    '"content":"yes"',
    "",
    'vllm:generation_tokens_total{model_name="SmolLM2-135M-Instruct"}',
    '"model":"SmolLM2-135M-Instruct"',
]


def run(command: str) -> tuple[int, str]:
    """The HTTP status and the body."""
    _, *args = shlex.split(command.replace("\\\n", " "))
    if shutil.which("curl") is None:
        return run_without_curl(args)
    written = ["--silent", "--show-error", "--max-time", "60", "--write-out", "\n%{http_code}"]
    done = subprocess.run(["curl", *written, *args], capture_output=True, text=True, check=True)
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def run_without_curl(args: list[str]) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    asked = parser.parse_args(args)
    headers = dict(one.split(": ", 1) for one in asked.H)
    method = "GET" if asked.d is None else "POST"
    reply = httpx.request(method, asked.url, headers=headers, content=asked.d, timeout=60)
    return reply.status_code, reply.text


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    few = ["--max_decode_seqs=2", "--max_prefill_seqs=1", "--prefill_len_padding=64"]  # programs to compile
    process = start("--port=0", "--max_model_len=256", "--num_blocks=32", *few)
    with serving(process) as (address, _):
        await_ready(process, address)
        yield address
        process.terminate()
        assert process.wait(30) == 0


def streamed(body: str) -> list[Any]:
    events = [one.removeprefix("data: ") for one in body.strip().split("\n\n")]
    return [json.loads(one) for one in events if one != "[DONE]"]


def test_every_command_of_the_readme(address: str) -> None:
    """In one test: the commands share what is compiled for them, and their order."""
    assert len(COMMANDS) == len(SENSIBLE)
    for command, sensible in zip(COMMANDS, SENSIBLE, strict=True):
        assert "http://localhost:7080/" in command
        status, body = run(command.replace("http://localhost:7080", address))
        assert status == 200, (command, body)
        assert sensible in body, (command, body)
        if "-N" in command:
            assert len(streamed(body)) > 5


def test_every_path_of_the_readme_is_a_route(address: str) -> None:
    section = (ROOT / "README.md").read_text().partition("## Ask it")[2].partition("## What is not built")[0]
    paths = set(re.findall(r"`(/[\w/]*)`", section))
    assert len(paths) > 15
    for path in paths:
        statuses = {httpx.request(method, address + path).status_code for method in ("GET", "POST")}
        assert statuses - {404, 405}, path


def test_without_curl(address: str) -> None:
    """On machines without curl the same is asked otherwise."""
    url = f"{address}/v1/completions"
    args = shlex.split(
        f"""-N {url} -H 'Content-Type: application/json' -d '{{"prompt": "x", "max_tokens": 1}}'"""
    )
    assert run_without_curl(args)[0] == 200


def test_the_first_steps_need_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """What tools/newcomer.py runs in a clean clone; those that need no server, here too."""
    serve, ask, activate, bench, *others = commands((ROOT / "README.md").read_text())
    assert (serve, ask[:5], activate) == ("make serve", "curl ", "source .venv/bin/activate")
    args = shlex.split(bench, comments=True)
    assert args[:3] == ["hex-llm", "bench", "serve"]
    parse_client(client_parser("serve", ""), args[3:])
    for command in others:
        assert main(shlex.split(command, comments=True)[1:]) == 0, capsys.readouterr().err
    assert "aiplatform.Model.upload" in capsys.readouterr().out
