"""Fetching from a bucket emulator, and all the ways it can fail."""

from __future__ import annotations

import inspect
import signal
import time
from pathlib import Path

import pytest

from hex_llm.errors import SourceError
from hex_llm.weights import bucket as bucket_module
from hex_llm.weights.source import fetch
from tests.weights.conftest import Bucket, Child, assert_one_line
from tests.weights.hub_server import Fault
from tests.weights.model_folder import MODEL, TEXT, UNWANTED, contents, names, write


def in_folder(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"m/{name}": data for name, data in files.items()}


def test_only_the_needed_objects_come_and_only_once(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(in_folder({**MODEL, **UNWANTED}))
    folder = fetch("gs://b/m", cache_dir=tmp_path / "cache")
    assert contents(folder) == MODEL
    bucket.proxy.log.clear()
    assert fetch("gs://b/m/", cache_dir=tmp_path / "cache") == folder
    assert not bucket.proxy.asked("download")
    assert names(fetch("gs://b/m", cache_dir=tmp_path / "cache", tokenizer_only=True)) == TEXT


def test_a_changed_object_is_fetched_again(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(in_folder(MODEL))
    before = fetch("gs://b/m", cache_dir=tmp_path / "cache")
    bucket.put({"m/config.json": b'{"model_type": "gemma"}'})
    after = fetch("gs://b/m", cache_dir=tmp_path / "cache")
    assert (after / "config.json").read_bytes() == b'{"model_type": "gemma"}'
    assert contents(before) == MODEL  # a server that still reads the old one keeps it


def test_gguf_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put({"m/a.gguf": b"GGUF a", "m/b.gguf": b"GGUF b"})
    assert fetch("gs://b/m/b.gguf", cache_dir=tmp_path / "cache").read_bytes() == b"GGUF b"
    with pytest.raises(SourceError, match=r"name one: gs://b/m/a.gguf, gs://b/m/b.gguf"):
        fetch("gs://b/m", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "address", ["gs://", "gs:///m", "gs://b/../c", "gs://b//m", "gs://./m", "gs://b/m/.."]
)
def test_addresses_that_are_none(tmp_path: Path, address: str) -> None:
    with pytest.raises(SourceError, match="is no bucket's address; give gs://bucket/folder"):
        fetch(address, cache_dir=tmp_path / "cache")


def test_what_a_bucket_does_not_have_or_should_not(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put({"bin/config.json": b"{}", "bin/pytorch_model.bin": b"pickle"})
    for address, words in {
        "gs://nobody/m": "there is no gs://nobody/m .*check the spelling",
        "gs://b/none": "there is no gs://b/none .*check the spelling",
        "gs://b/bin": "only PyTorch files .pytorch_model.bin.*convert them",
    }.items():
        with pytest.raises(SourceError, match=words) as refused:
            fetch(address, cache_dir=tmp_path / "cache")
        assert_one_line(str(refused.value))
    assert not names(tmp_path / "cache")


def rewrite(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, old: bytes, new: bytes) -> None:
    """From now on the bucket says `new` where it would say `old`."""
    sound = bucket.proxy.answer

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        status, kept, body = sound(method, path, headers)
        return status, kept, body.replace(old, new)

    monkeypatch.setattr(bucket.proxy, "answer", answer)


def test_names_that_escape_are_refused(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(in_folder(MODEL))
    rewrite(bucket, monkeypatch, b'"m/merges.txt"', b'"m/../evil.json"')
    with pytest.raises(SourceError, match=r"'../evil.json', a name that leads out of its folder"):
        fetch("gs://b/m", cache_dir=tmp_path / "cache")
    assert not names(tmp_path / "cache")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault("/b/b/o[?]", status=401), ["refuses gs://b/m", "storage.objects.get"]),
        (Fault("/b/b/o[?]", status=403), ["refuses gs://b/m", "storage.objects.get"]),
        (Fault("/b/b/o[?]", status=500), ["answers 500", "later"]),
        (Fault("download.*safetensors", status=403), ["refuses gs://b/m", "storage.objects.get"]),
        (Fault("download.*safetensors", status=404), ["there is no gs://b/m (any more)"]),
        (Fault("download.*safetensors", status=503), ["answers 503", "later"]),
        (Fault("download.*safetensors", status=200), ["came with", "of 70000 bytes", "try again"]),
        (Fault("download.*safetensors", stall=30_000), ["stopped half way", "try again"]),
        (Fault("download.*safetensors", cut=30_000), ["stopped half way", "try again"]),
    ],
    ids=lambda value: (
        f"{value.where}-{value.status or value.cut or value.stall}" if isinstance(value, Fault) else ""
    ),
)
def test_the_bucket_fails_and_the_next_start_completes(
    bucket: Bucket, tmp_path: Path, fault: Fault, words: list[str]
) -> None:
    cache = tmp_path / "cache"
    bucket.put(in_folder(MODEL))
    bucket.proxy.faults = [fault]
    begin = time.monotonic()
    with pytest.raises(SourceError) as refused:
        fetch("gs://b/m", cache_dir=cache)
    assert time.monotonic() - begin < 25
    assert_one_line(str(refused.value), *words)
    assert not [path for path in cache.glob("gs/*") if path.is_dir() and path.suffix != ".part"]
    assert not list(cache.rglob("*.tmp"))
    assert not list(cache.rglob("model.safetensors"))
    bucket.proxy.faults = []
    assert contents(fetch("gs://b/m", cache_dir=cache)) == MODEL


def test_one_failure_is_outlived(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(in_folder(MODEL))
    bucket.proxy.faults = [Fault("/o[?]", status=503, times=1), Fault("safetensors[?]", cut=30_000, times=1)]
    assert contents(fetch("gs://b/m", cache_dir=tmp_path / "cache")) == MODEL


def test_what_the_bucket_takes_from_gcsfs_is_there() -> None:
    """A method of its own, and the retries around it that can be taken away: what pyproject bounds it for."""
    from gcsfs.core import GCSFileSystem

    once = inspect.unwrap(GCSFileSystem._request)
    assert once is not GCSFileSystem._request
    assert list(inspect.signature(once).parameters)[:3] == ["self", "method", "path"]


def test_a_slow_bucket_is_waited_for_but_not_a_silent_one(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(in_folder(MODEL))
    monkeypatch.setattr(bucket_module, "SILENCE_S", 1.0)
    bucket.proxy.faults = [Fault("safetensors[?]", pause=0.12)]
    assert contents(fetch("gs://b/m", cache_dir=tmp_path / "cache")) == MODEL
    bucket.proxy.faults = [Fault("/b/b/o[?]", stall=-1)]
    with pytest.raises(SourceError, match=r"does not answer.*check the network"):
        fetch("gs://b/m", cache_dir=tmp_path / "cache")


def test_damaged_bytes_are_refused(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put(in_folder(MODEL))
    rewrite(bucket, monkeypatch, b"weights" * 100, b"weighty" * 100)
    with pytest.raises(
        SourceError, match=r"gs://b/m/model.safetensors came with a wrong checksum.*try again"
    ):
        fetch("gs://b/m", cache_dir=tmp_path / "cache")
    assert not list(tmp_path.rglob("model.safetensors"))


def test_large_objects_come_in_pieces(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "PIECE", 30_000)
    bucket.put(in_folder(MODEL))
    assert contents(fetch("gs://b/m", cache_dir=tmp_path / "cache")) == MODEL
    assert len(bucket.proxy.asked("download.*model.safetensors[?]")) == 3


def test_two_processes_at_once_download_once(bucket: Bucket, child: Child) -> None:
    bucket.put(in_folder(MODEL))
    bucket.proxy.faults = [Fault("safetensors[?]", pause=0.1)]
    processes = [child.start("gs://b/m") for _ in range(2)]
    folders = [child.outcome(process).path for process in processes]
    assert folders[0] == folders[1]
    assert contents(folders[0]) == MODEL
    assert len(bucket.proxy.asked("download.*model.safetensors[?]")) == 1


def test_a_killed_download_is_not_taken_for_whole(bucket: Bucket, child: Child) -> None:
    bucket.put(in_folder(MODEL))
    bucket.proxy.faults = [Fault("download.*safetensors[?]", stall=30_000)]
    process = child.start("gs://b/m")
    while not bucket.proxy.asked("download.*safetensors[?]"):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    bucket.proxy.faults = []
    assert contents(child.fetch("gs://b/m").path) == MODEL


def test_a_disk_without_room_for_the_bucket(bucket: Bucket, child: Child) -> None:
    bucket.put(in_folder(MODEL))
    child.fetch_on_full_disk("gs://b/m").refused_with("gs://b/m", "the disk is full", "--download_dir")
    assert not list(child.cache.rglob("*.tmp"))


def test_gcsfs_is_optional(tmp_path: Path, child: Child) -> None:
    write(tmp_path / "without" / "gcsfs", {"__init__.py": b"raise ImportError('not here')"})
    refused = child.fetch("gs://b/m", environ={"PYTHONPATH": str(tmp_path / "without")})
    refused.refused_with('pip install "hex-llm[gcs]"')
