"""Models of a Cloud Storage bucket, downloaded into a cache folder that appears when it is complete."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import inspect
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from hex_llm.errors import SourceError
from hex_llm.weights.files import WantedFiles, choose, folder_or_gguf, refusals

T = TypeVar("T")
Entry = dict[str, Any]  # an object in a bucket, as gcsfs lists it

SILENCE_S = 3.0  # a connection that brings no byte for so long is given up
PIECE = 64 << 20  # bytes asked for at once, over several connections


def fetch_from_bucket(address: str, cache: Path, wish: WantedFiles) -> Path:
    """Each state of the remote folder gets a local one of its own, under that name once it is complete."""
    root = address.removeprefix("gs://").removesuffix("/")
    if any(part in ("", ".", "..") for part in root.split("/")):
        raise SourceError(
            f"{address!r} is no bucket's address; give gs://bucket/folder, without empty parts or .."
        )
    with refusals(partial(_bucket_problem, address=address, silent="does not answer")):
        bucket = _open_bucket()
        entries = {_under(root, entry): entry for entry in _twice(lambda: bucket.ls(root, detail=True))}
    chosen = choose(entries, wish, address, "/")
    wish.check_size(sum(entries[name]["size"] for name in chosen), address)
    folder = cache / _state(root, [entries[name] for name in chosen])
    broken_off = refusals(partial(_bucket_problem, address=address, silent="stopped half way"))
    with _locked(cache / f"{folder.name}.lock"), broken_off:
        if not folder.is_dir():
            _download(bucket, {name: entries[name] for name in chosen}, folder)
    return folder_or_gguf([folder / name for name in chosen])


def _under(root: str, entry: Entry) -> str:
    """Its name relative to `root`, which may also be the object itself."""
    name: str = entry["name"]
    if name == root:
        return name.rpartition("/")[2]
    return name.removeprefix(root + "/") + ("/" if entry["type"] == "directory" else "")


def _state(root: str, entries: list[Entry]) -> str:
    """A folder's name for these objects as they are now."""
    key = json.dumps([(entry["name"], entry["generation"], entry["size"]) for entry in entries])
    return re.sub(r"[^\w.-]", "_", root)[-80:] + "-" + hashlib.sha256(key.encode()).hexdigest()[:20]


def _download(bucket: Any, entries: dict[str, Entry], folder: Path) -> None:
    """Into a folder of another name first. What is complete in it from an earlier, broken try is kept."""
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(mode=0o700, exist_ok=True)
    for stray in part.glob("*.tmp"):
        stray.unlink()
    num_bytes = sum(entry["size"] for entry in entries.values())
    with tqdm(desc=folder.name, total=num_bytes, unit="B", unit_scale=True, disable=None) as bar:
        for name, entry in entries.items():
            if not (part / name).exists():
                _download_one(bucket, entry, part / name, bar)
    part.rename(folder)


def _download_one(bucket: Any, entry: Entry, target: Path, bar: tqdm[Any]) -> None:
    """`target` appears when all its bytes have come and their checksum is right."""
    temporary = target.with_name(f"{uuid.uuid4().hex}.tmp")
    checksum, expected = _checksum(entry)
    try:
        with temporary.open("wb") as file:
            for start in range(0, entry["size"], PIECE):
                data = _piece(bucket, entry, start, min(start + PIECE, entry["size"]))
                file.write(data)
                checksum.update(data)
                bar.update(len(data))
        if expected and base64.b64encode(checksum.digest()).decode() != expected:
            raise SourceError(
                f"gs://{entry['name']} came with a wrong checksum and was thrown away; try again"
            )
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)


def _piece(bucket: Any, entry: Entry, start: int, end: int) -> bytes:
    pinned = {"generation": entry["generation"], "concurrency": 4}
    data: bytes = _twice(lambda: bucket.cat_file(entry["name"], start, end, **pinned))
    if len(data) != end - start:
        raise SourceError(f"gs://{entry['name']} came with {len(data)} of {end - start} bytes; try again")
    return data


def _checksum(entry: Entry) -> tuple[Any, str | None]:
    """What computes the object's checksum, and its value where the bucket gives one."""
    from google_crc32c import Checksum

    if entry.get("crc32c"):
        return Checksum(), entry["crc32c"]  # type: ignore[no-untyped-call]
    return hashlib.md5(usedforsecurity=False), entry.get("md5Hash")


def _open_bucket() -> Any:
    try:
        from aiohttp import ClientTimeout
        from gcsfs.core import GCSFileSystem  # not gcsfs.GCSFileSystem, which asks further services first
        from google.auth.exceptions import GoogleAuthError
    except ImportError as error:
        raise SourceError(
            'gs:// addresses need gcsfs; install it with `pip install "hex-llm[gcs]"`'
        ) from error
    silence = ClientTimeout(total=None, connect=SILENCE_S, sock_read=SILENCE_S)
    connect = partial(GCSFileSystem, access="read_only", requests_timeout=silence, skip_instance_cache=True)
    bucket = connect(token="anon", use_listings_cache=False)
    if bucket.on_google:  # an emulator wants no credentials
        with suppress(GoogleAuthError):
            bucket = connect(token="google_default", use_listings_cache=False)
    bucket._request = partial(inspect.unwrap(GCSFileSystem._request), bucket)  # without its minute of retries
    return bucket


def _twice(call: Callable[[], T]) -> T:
    from gcsfs.retry import is_retriable

    try:
        return call()
    except Exception as error:
        if not (is_retriable(error) or isinstance(error, TimeoutError)):
            raise
    time.sleep(0.5)
    return call()


def _bucket_problem(error: Exception, address: str, silent: str) -> str:
    """`silent` tells what a lost connection means."""
    code = getattr(error, "code", None)
    if isinstance(error, FileNotFoundError):
        return f"there is no {address} (any more); check the spelling of the bucket and the folder"
    if code in (401, 403) or str(error).startswith("Forbidden"):
        return (
            f"the bucket refuses {address}; log in (gcloud auth application-default login) as an account "
            "that is granted storage.objects.get and storage.objects.list on it"
        )
    if code is not None:
        return f"the bucket answers {code} for {address}; try again later"
    return f"the bucket {silent} for {address} ({type(error).__name__}); check the network and try again"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock of one that dies is free."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
