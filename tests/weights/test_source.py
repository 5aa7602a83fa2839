"""Fetching from the disk and a hub-shaped server, and all the ways it can fail."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hex_llm.errors import SourceError
from hex_llm.weights.source import fetch, private_folder
from tests.weights.conftest import Child, assert_one_line
from tests.weights.hub_server import Fault, Hub
from tests.weights.model_folder import MODEL, TEXT, UNWANTED, contents, names, write

API = "GET /api/models/"
DOWNLOAD = "GET /org/m/resolve/.*model.safetensors$"


# --- the disk


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {**MODEL, **UNWANTED})
    assert fetch(str(folder), cache_dir=tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_a_gguf_is_itself_alone_or_in_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"a.gguf": b"GGUF"})
    assert fetch(str(folder / "a.gguf"), cache_dir=tmp_path) == folder / "a.gguf"
    assert fetch(str(folder), cache_dir=tmp_path) == folder / "a.gguf"
    assert fetch(str(folder), cache_dir=tmp_path, tokenizer_only=True) == folder / "a.gguf"


def test_a_relative_path_and_a_home_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "org" / "name", MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("org/name", cache_dir=tmp_path) == Path("org/name")
    assert fetch("~/org/name", cache_dir=tmp_path) == tmp_path / "org" / "name"


@pytest.mark.parametrize(
    ("option", "files"),
    [("config_only", {"config.json": b"{}"}), ("tokenizer_only", {"tokenizer.model": b"pieces"})],
)
def test_a_folder_without_weights_serves_where_none_are_wanted(
    tmp_path: Path, option: str, files: dict[str, bytes]
) -> None:
    folder = write(tmp_path / "m", files)
    assert fetch(str(folder), cache_dir=tmp_path, **{option: True}) == folder  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"no \*.safetensors and no GGUF"):
        fetch(str(folder), cache_dir=tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        *("", " ", "/no/such/folder", "./m", "../m", "~/m", "~nobody/m", "m.gguf", "org/m.gguf", "a/b/c"),
        *("s3://b/m", "a\0b", "x" * 5000 + "/", "org/", "/", "a name", "org/m:tag", "org/m\nfile"),
    ],
)
def test_what_is_no_path_is_refused_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("hex_llm.weights.hub.fetch_from_hub", None)
    with pytest.raises(SourceError) as refused:
        fetch(model, cache_dir=tmp_path)
    assert_one_line(str(refused.value), "")


def test_libraries_of_other_places_are_not_imported_for_a_local_model(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": b"x"})
    command = f"""
import sys
from pathlib import Path
from hex_llm.weights.source import fetch
path = Path({str(tmp_path)!r})
assert fetch(str(path), cache_dir=path) == path
assert not {{"huggingface_hub", "gcsfs"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", command], check=True)


def test_odd_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"weights.safetensors": b"x"})
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("weights.safetensors", "pipe.gguf"):
        with pytest.raises(SourceError, match=r"neither a folder nor a .gguf file"):
            fetch(str(tmp_path / name), cache_dir=tmp_path)


def test_pickles_alone_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(
        SourceError, match=r"only PyTorch files .pytorch_model.bin.*convert them to safetensors"
    ):
        fetch(str(folder), cache_dir=tmp_path)


@pytest.mark.parametrize("model", [None, ".", "gs://b/m"])
def test_a_revision_is_for_the_hub_only(tmp_path: Path, model: str | None) -> None:
    with pytest.raises(SourceError, match="--revision 'v1' is only for models of the hub"):
        fetch(model, revision="v1", cache_dir=tmp_path)


# --- the cache folder


def test_the_cache_is_private(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "a" / "cache" / "gs")
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


def test_a_cache_that_others_can_fill_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(SourceError, match="writable by others; make it yours"):
        fetch(None, cache_dir=cache)
    cache.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)
    with pytest.raises(SourceError, match="belongs to another user"):
        fetch("gs://b/m", cache_dir=cache)


# --- the hub


def test_only_the_needed_files_come_and_only_once(hub: Hub, child: Child) -> None:
    hub.put("org/m", {**MODEL, **UNWANTED})
    first = child.fetch("org/m", token="hf_secret")
    assert contents(first.path) == MODEL
    assert hub.asked("resolve.*hf_secret")
    assert not [line for line in hub.asked("org/m") if not line.endswith("Bearer hf_secret")]
    hub.log.clear()
    assert child.fetch("org/m").path == first.path
    assert not hub.asked("resolve|tree")


def test_without_the_hub_the_cache_serves(hub: Hub, child: Child) -> None:
    hub.put("org/m", MODEL)
    folder = child.fetch("org/m", tokenizer_only=True).path
    assert names(folder) == TEXT
    child.fetch("org/m", environ={"HF_HUB_OFFLINE": "1"}).refused_with(
        "org/m", "not complete", "HF_HUB_OFFLINE"
    )
    assert child.fetch("org/m").path == folder
    hub.log.clear()
    assert child.fetch("org/m", environ={"HF_HUB_OFFLINE": "1"}).path == folder
    assert not hub.log
    hub.faults = [Fault("", status=503)]
    assert child.fetch("org/m").path == folder
    assert contents(folder) == MODEL


def test_every_file_is_of_the_pinned_revision(hub: Hub, child: Child) -> None:
    old = {name: data + b" " for name, data in MODEL.items()}
    commit = hub.put("org/m", old, "v1")
    hub.put("org/m", MODEL)
    assert contents(child.fetch("org/m", revision="v1").path) == old
    assert set(hub.asked("resolve|tree")) == set(hub.asked(commit))
    assert contents(child.fetch("org/m", revision=commit, config_only=True).path) == old


def test_a_legacy_name_without_organisation(hub: Hub, child: Child) -> None:
    hub.put("gpt", MODEL)
    path = child.fetch("gpt", config_only=True).path
    assert names(path) == {"config.json", "generation_config.json"}


def test_repositories_of_gguf(hub: Hub, child: Child) -> None:
    hub.put("org/one", {"README.md": b"", "a.Q4_0.gguf": b"GGUF a"})
    path = child.fetch("org/one").path
    assert path is not None
    assert (path.name, path.read_bytes()) == ("a.Q4_0.gguf", b"GGUF a")
    hub.put(
        "org/two", {"config.json": b"{}", "a.gguf": b"GGUF a", "b.gguf": b"GGUF b", "sub/c.gguf": b"GGUF c"}
    )
    child.fetch("org/two").refused_with("several GGUF files", "org/two:a.gguf", "org/two:b.gguf")
    path = child.fetch("org/two:sub/c.gguf").path
    assert path is not None
    assert (path.name, path.read_bytes()) == ("c.gguf", b"GGUF c")
    assert not hub.asked("resolve.*/(a|b).gguf")
    child.fetch("org/two:../b.gguf").refused_with("org/two has no file '../b.gguf'", "a.gguf, b.gguf")


def test_pickles_and_names_that_escape_are_refused(hub: Hub, child: Child) -> None:
    hub.put("org/bin", {"config.json": b"{}", "pytorch_model.bin": b"pickle", "handler.py": b""})
    child.fetch("org/bin").refused_with(
        "only PyTorch files (pytorch_model.bin)", "convert them to safetensors"
    )
    hub.put("org/evil", {**MODEL, "../../evil.json": b"{}"})
    child.fetch("org/evil").refused_with("'../../evil.json'", "leads out of its folder")
    assert not hub.asked("resolve.*(bin$|py$|evil.json)")
    child.fetch("org/m", revision="../../x").refused_with("'../../x'", "check --revision")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(API, status=401), ["refuses org/m (401)", "spelling", "--hf_token", "licence"]),
        (
            Fault(DOWNLOAD, status=403, headers={"X-Error-Code": "GatedRepo"}),
            ["refuses org/m (403)", "HF_TOKEN"],
        ),
        (Fault(API + "org/m$", status=500), ["answers 500", "later"]),
        (Fault("tree", status=500), ["answers 500", "later"]),
        (Fault("HEAD", status=500), ["answers 500", "later"]),
        (Fault(DOWNLOAD, status=500), ["answers 500", "later"]),
        (Fault("HEAD", status=429, headers={"Retry-After": "300"}), ["limits", "429", "later"]),
        (Fault(API, stall=-1), ["ReadTimeout", "check the network"]),
        (Fault(DOWNLOAD, stall=30_000), ["stopped half way", "try again"]),
        (Fault(API, cut=10), ["RemoteProtocolError", "check the network"]),
        (Fault("", status=200), ["is unavailable from the hub", "HF_ENDPOINT"]),
    ],
    ids=lambda value: (
        f"{value.where}-{value.status or value.cut or value.stall}" if isinstance(value, Fault) else ""
    ),
)
def test_the_hub_fails(hub: Hub, child: Child, fault: Fault, words: list[str]) -> None:
    hub.put("org/m", MODEL)
    hub.faults = [fault]
    child.fetch("org/m", token="hf_secret").refused_with(*words)
    assert not list(child.folder.rglob("model.safetensors"))
    assert not list(child.folder.rglob("*.incomplete"))
    assert all(blob.read_bytes() in MODEL.values() for blob in child.folder.glob("hf/hub/*/blobs/*"))


def test_what_the_hub_does_not_have(hub: Hub, child: Child) -> None:
    hub.put("org/m", MODEL)
    child.fetch("org/none").refused_with("no model 'org/none'", "check the spelling")
    child.fetch("org/m", revision="v9").refused_with("no revision 'v9' of org/m", "--revision")
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    child.fetch("org/m", environ=nobody).refused_with("ConnectError", "check the network")


def test_a_broken_transfer_goes_on_where_it_stopped(hub: Hub, child: Child) -> None:
    big = {**MODEL, "model.safetensors": os.urandom(25 << 20)}
    hub.put("org/m", big)
    hub.faults = [Fault(DOWNLOAD, cut=15 << 20, times=1), Fault(DOWNLOAD, stall=11 << 20, times=1)]
    assert contents(child.fetch("org/m").path) == big
    ranges = [line.split()[-1] for line in hub.asked("GET .*model.safetensors( |$)")]
    assert ranges[1:] == [f"bytes={10 << 20}-", f"bytes={20 << 20}-"]


def test_an_interrupted_start_is_completed_by_the_next(hub: Hub, child: Child) -> None:
    hub.put("org/m", MODEL)
    hub.faults = [Fault(DOWNLOAD, cut=1000)]
    child.fetch("org/m").refused_with("stopped half way", "try again")
    assert not list(child.folder.rglob("model.safetensors"))
    assert not list(child.folder.rglob("*.incomplete"))
    child.fetch("org/m", environ={"HF_HUB_OFFLINE": "1"}).refused_with("not complete")
    hub.faults = []
    hub.log.clear()
    assert contents(child.fetch("org/m").path) == MODEL
    assert not hub.asked("GET .*config.json")


def test_a_slow_hub_is_waited_for_but_not_a_silent_one(hub: Hub, child: Child) -> None:
    hub.put("org/m", MODEL)
    hub.faults = [Fault(DOWNLOAD, pause=0.12), Fault("HEAD .*/tokenizer.model", stall=-1)]
    slow = child.fetch("org/m", environ={"HF_HUB_DOWNLOAD_TIMEOUT": "1"})
    slow.refused_with("stopped half way", "HF_HUB_DOWNLOAD_TIMEOUT allows for silences longer than 1 s")
    assert len(list(child.folder.rglob("model.safetensors"))) == 1


def test_a_full_disk(hub: Hub, child: Child) -> None:
    hub.put("org/m", MODEL)
    child.fetch_on_full_disk("org/m").refused_with("the disk is full", "HF_HOME")
    assert not list(child.folder.rglob("model.safetensors"))
    assert not list(child.folder.rglob("*.incomplete"))
