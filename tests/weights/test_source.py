"""Fetching from the disk, a hub-shaped server and a bucket emulator, and all the ways it can fail."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import pytest

from hex_llm.errors import SourceError
from hex_llm.weights import bucket as bucket_module
from hex_llm.weights.source import fetch, private_folder
from tests.weights.conftest import Bucket, Child, assert_one_line
from tests.weights.hub_server import Fault, Hub

MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "model.safetensors": b"weights" * 10_000,
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer.model": b"pieces",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
}
UNWANTED = {
    "README.md": b"# model",
    "consolidated.safetensors": b"a copy",
    "model.Q4_0.gguf": b"GGUF",
    "modeling_llama.py": b"raise SystemExit",
    "onnx/model.onnx": b"onnx",
    "original/consolidated.00.pth": b"pickle",
    "original/tokenizer.json": b"{ }",
    "pytorch_model.bin": b"pickle",
    "training_args.pt": b"pickle",
}
TEXT = set(MODEL) - {"model.safetensors"}
API = "GET /api/models/"
DOWNLOAD = "GET /org/m/resolve/.*model.safetensors$"


def names(folder: Path | None) -> set[str]:
    assert folder is not None
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def contents(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {name: (folder / name).read_bytes() for name in names(folder)}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


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
    monkeypatch.setattr("hex_llm.weights.source.fetch_from_hub", None)
    with pytest.raises(SourceError) as refused:
        fetch(model, cache_dir=tmp_path)
    assert_one_line(str(refused.value), "")


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


# --- buckets


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
    assert time.monotonic() - begin < 10
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
