"""The parts of `hex-llm serve`: its port, what it says first, what it logs, how it ends."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from typing import Any

import pytest

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ConfigError, ModelError
from hex_llm.frontend.client import EngineClient
from hex_llm.launch import local
from tests.server.fakes import byte_tokenizer, fake_worker


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
    engine = EngineClient(EngineConfig(), "fake")
    engine.tokenizer = tokenizer
    engine.replicas[0].status.memory = "memory: weights 1.0 MiB"
    banner = local.banner(engine, ServerConfig(api_key="secret"), "http://0.0.0.0:7080")
    assert "  memory: weights 1.0 MiB\n" in banner
    assert "http://0.0.0.0:7080\n" in banner
    assert "fake" in banner
    assert "secret" not in banner
    (line,) = re.findall("curl .*", banner)
    assert line.startswith("curl http://localhost:7080/v1/")
    assert json.loads(line.split("'")[1]) == {**body, "temperature": 0}


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("fail(ModelError('no such model'))", "no such model"),
        ("fail(RuntimeError('a\\nb'))", "the engine failed: RuntimeError: a b"),
        ("__import__('os').abort()", "the engine's process was killed by SIGABRT"),
    ],
)
def test_a_failure_to_load_ends_the_server(load: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def client(config: EngineConfig, name: str) -> EngineClient:
        return EngineClient(config, name, fake_worker(load))

    monkeypatch.setattr(local, "EngineClient", client)
    monkeypatch.setattr(local, "configure_logging", lambda _: None)
    with pytest.raises(ModelError) as caught:
        local.serve(EngineConfig(), ServerConfig(host="127.0.0.1", port=0))
    assert str(caught.value) == message


def test_others_log_only_warnings() -> None:
    script = (
        "import logging; from hex_llm.config import ServerConfig; from hex_llm.launch.local import *; "
        "configure_logging(ServerConfig(log_level='DEBUG')); "
        "print(*(logging.getLogger(n).getEffectiveLevel() for n in ('hex_llm.x', 'uvicorn.access', 'httpx')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(level) for level in (logging.DEBUG, logging.DEBUG, logging.WARNING)]
