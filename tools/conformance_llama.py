"""A plugin for pytest: llama.cpp's own tests of its server ask ours instead (see tools/conformance.py).

Knows nothing of this project but its command: it runs in the environment that has the tests' libraries. Their
class for a server is told to start ours, with the embedded model, and to keep it until one wants other flags.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import types
import urllib.request
from typing import Any

import pytest

ROUTES = ("/v1/", "/chat/completions", "/responses", "/predict", "OpenAI(")
# What llama.cpp alone has, and what only its tiny model says or counts.
OWN = re.compile(
    "__verbose|timings|return_progress|prompt_progress|system_fingerprint|re_prefill|id_slot|/slots|/tokenize|"
    "/input_tokens|prompt_string|same_as_string|pooling_none|image|vision_server|is_slow_test_allowed|"
    r"tinygemma3|n_prompt|n_tokens|usage_multiple|\(Suddenly\)|\(going\|bed\)"
)
UNPREFIXED = ("/chat/completions", "/responses")  # llama.cpp also has OpenAI's routes without /v1

sys.modules.setdefault("wget", types.ModuleType("wget"))  # nothing is fetched, so they need not have it


class Running:
    """Our server, and what it was started with."""

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def start(self, flags: list[str], limit_s: float = 300) -> None:
        if flags == self.flags and self.process is not None and self.process.poll() is None:
            return
        self.stop()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [*shlex.split(os.environ["HEX_LLM_SERVE"]), f"--port={self.port}", *flags]
        self.flags, self.process = flags, subprocess.Popen(command)
        until = time.monotonic() + limit_s
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("our server has not started")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        self.process = None


RUNNING = Running()


def flags_of(server: Any) -> list[str]:
    """llama.cpp divides its context among its slots."""
    flags = [f"--max-model-len={(server.n_ctx or 4096) // (server.n_slots or 1)}"]
    named = {"served-model-name": server.model_alias, "api-key": server.api_key, "tool-call-parser": "hermes"}
    named["predict-route"] = "/predict" if server.gcp_compat else None
    named["chat-template"] = server.chat_template_file or server.chat_template
    if server.pooling:
        named["pooler-config"] = json.dumps({"pooling_type": server.pooling.upper()})
    return flags + [one for name, value in named.items() if value for one in (f"--{name}", value)]


def start(self: Any, timeout_seconds: int = 0) -> None:
    RUNNING.start(flags_of(self))
    self.server_host, self.server_port = "127.0.0.1", RUNNING.port


def pytest_configure(config: pytest.Config) -> None:
    utils = importlib.import_module("utils")
    make_url = utils.ServerProcess.make_url

    def url(self: Any, path: str, host: str | None = None) -> str:
        return str(make_url(self, f"/v1{path}" if path.startswith(UNPREFIXED) else path, host))

    utils.ServerProcess.start, utils.ServerProcess.make_url = start, url
    utils.ServerProcess.stop = lambda self: None
    utils.ServerPreset.load_all = staticmethod(lambda: None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    def applies(item: Any) -> bool:
        text = inspect.getsource(item.function)
        helpers = [
            value for name, value in vars(item.module).items() if name.startswith("do_test") and name in text
        ]
        text += "".join(map(inspect.getsource, helpers))
        asks_us = any(route in text for route in ROUTES) and not OWN.search(text)
        return asks_us and item.get_closest_marker("slow") is None

    left_out = [item for item in items if not applies(item)]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def pytest_unconfigure(config: pytest.Config) -> None:
    RUNNING.stop()
