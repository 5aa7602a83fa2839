"""Turns what the user named as model or tokenizer — nothing, a path, gs://…, a hub name — into local files.

Knows where files come from and which of them are wanted; does not know what is in them. Whatever goes
wrong is a SourceError of one line, soon: a server that is silent or refuses twice is not asked again.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import fnmatch
import hashlib
import inspect
import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub import HfApi, constants, get_cached_repo_tree, is_offline_mode, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils._http import default_client_factory
from tqdm import tqdm

from hex_llm.errors import SourceError
from hex_llm.weights.default_model import fetch_default

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")
Entry = dict[str, Any]  # an object in a bucket, as gcsfs lists it

HUB_SILENCE_S = 2.0  # a connection that brings no byte for so long is given up; the library adds its pauses
BUCKET_SILENCE_S = 3.0
TRIES = 2
PIECE = 64 << 20  # bytes asked of a bucket at once, over several connections
HUB_NAME = re.compile(r"(?P<repo>(?:\w[\w.-]*/)?\w[\w.-]*)(?::(?P<file>.+\.gguf))?", re.ASCII)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLOSED_DISK = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Wish:
    """Which files of a model are wanted: those like `files`, if one is like `proof`; else the only GGUF."""

    files: tuple[str, ...]
    proof: tuple[str, ...]


TEXT = ("*.json", "*.jinja", "tokenizer.model", "merges.txt")
MODEL = Wish((*TEXT, "*.safetensors"), ("*.safetensors",))
TOKENIZER = Wish(TEXT, ("tokenizer.json", "tokenizer.model", "vocab.json"))
CONFIG = Wish(("config.json", "generation_config.json"), ("config.json",))


def fetch(
    model: str | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: Path,
    tokenizer_only: bool = False,
    config_only: bool = False,
) -> Path:
    """The folder, or the GGUF file, that holds `model` (None: the embedded default), fetched if need be.

    A folder may hold more than was wished for; what was wished for is there and whole.
    """
    wish = CONFIG if config_only else TOKENIZER if tokenizer_only else MODEL
    try:
        return _fetch(model, revision, token, cache_dir, wish)
    except OSError as error:
        raise SourceError(f"{model or 'the embedded default model'} cannot be had: {_disk(error)}") from error


def _fetch(model: str | None, revision: str | None, token: str | None, cache_dir: Path, wish: Wish) -> Path:
    if model is not None and (named := _hub_name(model)):
        return _from_hub(named["repo"], named["file"], revision, token, wish)
    if revision is not None:
        raise SourceError(f"--revision {revision!r} is only for models of the hub; leave it out")
    if model is None:
        return fetch_default(private_folder(cache_dir / "default"))
    if model.startswith("gs://"):
        return _from_bucket(model, private_folder(cache_dir / "gs"), wish)
    return _from_disk(model, wish)


def private_folder(path: Path) -> Path:
    """`path`, made if need be, and refused if anyone else can put files into it or into its parent."""
    for folder in (path.parent, path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        stat = folder.stat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
            raise SourceError(
                f"the cache folder {folder} belongs to another user or is writable by others; "
                "make it yours (chown, chmod 700) or set another --download_dir"
            )
    return path


def _disk(error: OSError) -> str:
    if error.errno in FULL_DISK:
        return "the disk is full; make room, or set another --download_dir (HF_HOME for the hub's cache)"
    return (
        f"{error.strerror or type(error).__name__}; check the permissions of its folder and of --download_dir"
    )


def _of_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in (*FULL_DISK, *CLOSED_DISK)


# --- the disk


def _hub_name(model: str) -> re.Match[str] | None:
    """The parts of a name to ask the hub for; None if it is there on the disk, or could only be there."""
    named = HUB_NAME.fullmatch(model)
    like_a_path = model.endswith(".gguf") and not (named and named["file"])
    return None if like_a_path or model.startswith("gs://") or _exists(model) else named


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _from_disk(model: str, wish: Wish) -> Path:
    path = Path(os.path.expanduser(model))
    if not _exists(model):
        raise SourceError(
            f"there is no file or folder {model!r}; give an existing one, a hub name such as org/name, "
            "or gs://bucket/folder"
        )
    if path.is_dir():
        return _folder_or_gguf([path / name for name in _choose(os.listdir(path), wish, model, "/")])
    if path.is_file() and path.suffix == ".gguf":
        return path
    raise SourceError(f"{model!r} is neither a folder nor a .gguf file; give the folder that holds the model")


# --- which files


def _choose(names: Iterable[str], wish: Wish, origin: str, joint: str) -> list[str]:
    """The wanted ones of `names`. Only the top folder counts: the others hold copies in other formats."""
    names = sorted(names)
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise SourceError(
                f"{origin} holds {name!r}, a name that leads out of its folder; do not trust it"
            )
    top = [name for name in names if "/" not in name]
    if not _like(top, *wish.proof):
        return [_single_gguf(top, wish, origin, joint)]
    chosen = _like(top, *wish.files)
    copies = _like(chosen, "consolidated*.safetensors") if _like(chosen, "model*.safetensors") else []
    return [name for name in chosen if name not in copies]


def _single_gguf(names: list[str], wish: Wish, origin: str, joint: str) -> str:
    found = _like(names, "*.gguf")
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(f"{origin} holds several GGUF files; name one: {_some(found, origin + joint)}")
    if pickles := _like(names, *PICKLES):
        raise SourceError(
            f"{origin} holds only PyTorch files ({_some(pickles)}), which can run code when they are read; "
            "convert them to safetensors"
        )
    raise SourceError(
        f"{origin} holds no {' or '.join(wish.proof)} and no GGUF file; check that it is a model"
    )


def _like(names: Iterable[str], *patterns: str) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _some(names: list[str], prefix: str = "") -> str:
    return ", ".join(prefix + name for name in names[:20]) + (", …" if len(names) > 20 else "")


def _folder_or_gguf(paths: list[Path]) -> Path:
    return paths[0] if paths[0].suffix == ".gguf" else paths[0].parent


# --- the hub


def _from_hub(repo: str, file: str | None, revision: str | None, token: str | None, wish: Wish) -> Path:
    """All files are of one commit, looked up once; those already in the hub's cache are not asked for."""
    if revision is not None and (
        ".." in revision or revision.startswith("/")
    ):  # it becomes a path in the cache
        raise SourceError(f"{revision!r} is no branch, tag or commit; check --revision")
    hub = HfApi(token=token or None, library_name="hex_llm")
    with _bounded_hub(repo, revision):
        commit = hub.resolve_revision(repo, revision=revision).resolved
        hub.snapshot_download(repo, revision=commit, allow_patterns="config.json")  # keeps the listing too
        names = [entry.path for entry in get_cached_repo_tree(repo, revision=commit)]
        if file and file not in names:
            raise SourceError(
                f"{repo} has no file {file!r}; it has {_some(_like(names, '*.gguf')) or 'no GGUF'}"
            )
        chosen = [file] if file else _choose(names, wish, repo, ":")
        return _folder_or_gguf([Path(hub.hf_hub_download(repo, name, revision=commit)) for name in chosen])


@contextmanager
def _bounded_hub(repo: str, revision: str | None) -> Iterator[None]:
    """Inside, the hub library gives up in seconds, logs nothing, and raises SourceError or a disk's error."""
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    set_client_factory(_Patience(repo, revision).client)
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        if _of_disk(error):
            raise
        raise SourceError(_hub_problem(error, repo, revision)) from error
    finally:
        set_client_factory(default_client_factory)
        hub_logging.set_verbosity(verbosity)


class _Patience:
    """Watches the hub library's requests: left to itself it retries for minutes.

    The same bytes are asked for `TRIES` times at most; a range that starts later is progress and counts anew.
    """

    def __init__(self, repo: str, revision: str | None) -> None:
        self.repo = repo
        self.revision = revision
        self.num_sent: Counter[tuple[str, str, str | None]] = Counter()
        chosen = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self.silence_s = HUB_SILENCE_S if chosen == constants.DEFAULT_DOWNLOAD_TIMEOUT else chosen

    def client(self) -> httpx2.Client:
        client = default_client_factory()
        hooks = client.event_hooks
        client.event_hooks = {"request": [*hooks["request"], self.sending], "response": [self.answered]}
        return client

    def sending(self, request: httpx2.Request) -> None:
        request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"), self.silence_s)
        self.num_sent[_asked(request)] += 1
        if self.num_sent[_asked(request)] > TRIES:
            raise SourceError(
                f"the hub stopped half way through {self.repo}; check the network and try again: complete "
                f"files are kept (HF_HUB_DOWNLOAD_TIMEOUT allows for silences longer than {self.silence_s} s)"
            )

    def answered(self, response: httpx2.Response) -> None:
        """Ends the library's retries: at once if it asks too often, after one more if the server fails."""
        status = response.status_code
        if status == 429 or (status >= 500 and self.num_sent[_asked(response.request)] >= TRIES):
            raise SourceError(_hub_refusal(status, None, self.repo, self.revision))


def _asked(request: httpx2.Request) -> tuple[str, str, str | None]:
    return request.method, str(request.url), request.headers.get("range")


def _hub_problem(error: Exception, repo: str, revision: str | None) -> str:
    for cause in (error, error.__cause__):
        if isinstance(cause, HfHubHTTPError):
            code = cause.response.headers.get("x-error-code")
            return _hub_refusal(cause.response.status_code, code, repo, revision)
    if isinstance(error, HFValidationError):
        return f"{repo!r} is no name of the hub; give org/name"
    if is_offline_mode():
        return (
            f"{repo} is not complete in the hub's cache and HF_HUB_OFFLINE is set; unset it once to fetch it"
        )
    return (
        f"{repo} cannot be had from the hub ({type(error.__cause__ or error).__name__}); check the network "
        "and HF_ENDPOINT and try again, or give a local folder"
    )


def _hub_refusal(status: int, code: str | None, repo: str, revision: str | None) -> str:
    if code == "RevisionNotFound":
        return f"the hub has no revision {revision!r} of {repo}; check --revision"
    if status == 404:
        return f"the hub has no model {repo!r}, and there is no such folder here; check the spelling"
    if status in (401, 403):
        return (
            f"the hub refuses {repo} ({status}): it is private, gated or not there; check the spelling, "
            "accept its licence on the hub, and give a token with --hf_token or HF_TOKEN"
        )
    if status == 429:
        return f"the hub limits your requests (429); try {repo} again later, or give a token with --hf_token"
    return f"the hub answers {status} for {repo}; try again later"


# --- buckets


def _from_bucket(address: str, cache: Path, wish: Wish) -> Path:
    """Each state of the remote folder gets a local one of its own, under that name once it is complete."""
    root = address.removeprefix("gs://").removesuffix("/")
    if any(part in ("", ".", "..") for part in root.split("/")):
        raise SourceError(
            f"{address!r} is no bucket's address; give gs://bucket/folder, without empty parts or .."
        )
    with _bucket_refusals(address, "does not answer"):
        bucket = _open_bucket()
        entries = {_under(root, entry): entry for entry in _twice(lambda: bucket.ls(root, detail=True))}
    chosen = _choose(entries, wish, address, "/")
    folder = cache / _state(root, [entries[name] for name in chosen])
    with _locked(cache / f"{folder.name}.lock"), _bucket_refusals(address, "stopped half way"):
        if not folder.is_dir():
            _download(bucket, {name: entries[name] for name in chosen}, folder)
    return _folder_or_gguf([folder / name for name in chosen])


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
    silence = ClientTimeout(total=None, connect=BUCKET_SILENCE_S, sock_read=BUCKET_SILENCE_S)
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


@contextmanager
def _bucket_refusals(address: str, silent: str) -> Iterator[None]:
    """Turns what gcsfs raises into SourceError; `silent` tells what a lost connection means here."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        if _of_disk(error):
            raise
        raise SourceError(_bucket_problem(error, address, silent)) from error


def _bucket_problem(error: Exception, address: str, silent: str) -> str:
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
