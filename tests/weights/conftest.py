"""Servers to fetch from, and a child process that fetches under an environment of its own."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from gcp_storage_emulator.server import Server, create_server

from tests.weights.hub_server import FaultyServer, Hub, Proxy, running

CHILD = """
import json, sys, time
from pathlib import Path
from hex_llm.errors import HexError
from hex_llm.weights.source import fetch
begin = time.monotonic()
try:
    print(fetch(cache_dir=Path(sys.argv[1]), **json.loads(sys.argv[2])))
except HexError as error:
    sys.exit(f"{time.monotonic() - begin} s refused: {error}")
"""


@dataclass(frozen=True)
class Outcome:
    path: Path | None
    refusal: str = ""
    seconds: float = 0

    def refused_with(self, *words: str) -> None:
        """One line, soon, that holds `words` and nothing that should stay inside."""
        assert self.path is None
        assert self.seconds < 30
        assert_one_line(self.refusal, *words)


def assert_one_line(message: str, *words: str) -> None:
    assert message.count("\n") == 0
    for word in words:
        assert word in message, message


@dataclass(frozen=True)
class Child:
    """Fetches in a new process, as a server's start does: the libraries read their settings when imported."""

    folder: Path
    environ: dict[str, str]

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    def start(
        self, model: str | None, *, environ: dict[str, str] | None = None, **options: object
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, str(self.cache), json.dumps({"model": model, **options})]
        env = {**os.environ, **self.environ, **(environ or {})}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def fetch(self, model: str | None, **options: object) -> Outcome:
        return self.outcome(self.start(model, **options))  # type: ignore[arg-type]

    def fetch_on_full_disk(self, model: str) -> Outcome:
        """No file can grow beyond 40 kB."""
        process = self.start(model)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (40_000, 40_000))
        return self.outcome(process)

    def outcome(self, process: subprocess.Popen[str]) -> Outcome:
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        assert "hf_secret" not in err
        if process.returncode == 0:
            return Outcome(Path(out.strip()))
        said, refused, message = err.rpartition(" s refused: ")
        assert refused, err
        return Outcome(None, message.removesuffix("\n"), float(said.split()[-1]))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        yield server


@pytest.fixture
def child(tmp_path: Path, hub: Hub) -> Child:
    return Child(tmp_path, {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""})


@dataclass(frozen=True)
class Bucket:
    """The emulator's bucket "b", seen through a proxy that can fail."""

    port: int
    proxy: FaultyServer

    def put(self, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            query = urllib.parse.urlencode({"uploadType": "media", "name": name})
            url = f"http://127.0.0.1:{self.port}/upload/storage/v1/b/b/o?{query}"
            kind = {"Content-Type": "application/octet-stream"}
            urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=10).read()


@pytest.fixture(scope="session")
def emulator() -> Iterator[tuple[Server, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with create_server("127.0.0.1", port, in_memory=True, default_bucket="b") as server:
        yield server, port


@pytest.fixture
def bucket(emulator: tuple[Server, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    server, port = emulator
    server.wipe(keep_buckets=True)
    with running(Proxy(port)) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield Bucket(port, proxy)
