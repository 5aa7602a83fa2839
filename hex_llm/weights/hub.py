"""Models of the Hugging Face hub, by its own library and in its own cache, but with less patience."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import (
    HfApi,
    constants,
    get_cached_repo_tree,
    get_session,
    hf_hub_url,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]
from huggingface_hub.utils import logging as hub_logging

from hex_llm.errors import SourceError
from hex_llm.weights.files import WantedFiles, choose, folder_or_gguf, like, refusals, some
from hex_llm.weights.safetensors import MAX_HEADER_BYTES

if TYPE_CHECKING:
    import httpx2

SILENCE_S = 2.0  # a connection that brings no byte for so long is given up; the library adds its pauses
TRIES = 2
HEAD_BYTES = {".safetensors": 1 << 17, ".gguf": 32 << 20}  # in which most headers end
ONE_AT_A_TIME = threading.Lock()  # threads of a process: what follows changes the library for all of them


def commit_of(repo: str, revision: str | None, token: str | None) -> str:
    """Where a branch or a tag is now; of an unreachable hub, where its cache last saw it."""
    with _bounded_hub(repo, revision):
        return _hub(token).resolve_revision(repo, revision=revision).resolved


def fetch_from_hub(
    repo: str,
    file: str | None,
    revision: str | None,
    token: str | None,
    wish: WantedFiles,
    cache: Path | None = None,
) -> Path:
    """All files are of one commit, looked up once; those already in the hub's cache are not asked for. A
    `cache` is another one than the user's."""
    hub = _hub(token)
    with _bounded_hub(repo, revision):
        commit = hub.resolve_revision(repo, revision=revision, cache_dir=cache).resolved
        # It keeps the listing too.
        hub.snapshot_download(repo, revision=commit, allow_patterns="config.json", cache_dir=cache)
        tree = get_cached_repo_tree(repo, revision=commit, cache_dir=cache)
        names = [entry.path for entry in tree]
        if file and file not in names:
            raise SourceError(
                f"{repo} has no file {file!r}; it has {some(like(names, '*.gguf')) or 'no GGUF'}"
            )
        chosen = [file] if file else choose(names, wish, repo, ":")
        wish.check_size(sum(entry.size for entry in tree if entry.path in chosen), repo)
        paths = [hub.hf_hub_download(repo, name, revision=commit, cache_dir=cache) for name in chosen]
        return folder_or_gguf([Path(path) for path in paths])


def headers_from_hub(
    repo: str, file: str | None, revision: str | None, token: str | None, wish: WantedFiles, folder: Path
) -> Path:
    """The model as fetch_from_hub finds it, in `folder`, with no more than the beginning of its large files:
    the rest of them is a hole, which takes no room and reads as zeros."""
    hub = _hub(token)
    with _bounded_hub(repo, revision):
        commit = hub.resolve_revision(repo, revision=revision).resolved
        sizes = {one.path: getattr(one, "size", 0) for one in hub.list_repo_tree(repo, revision=commit)}
        chosen = [file] if file else choose(sizes, wish, repo, ":")
        for name in (one for one in chosen if "/" not in one):
            suffix = Path(name).suffix
            if suffix in HEAD_BYTES:
                _write_head(folder / name, sizes.get(name, 0), hf_hub_url(repo, name, revision=commit), token)
            elif suffix == ".json" and "tokenizer" not in name:
                hub.hf_hub_download(repo, name, revision=commit, local_dir=folder)
        return folder_or_gguf([folder / chosen[0]])


def _write_head(path: Path, size: int, url: str, token: str | None) -> None:
    data = _first_bytes(url, HEAD_BYTES[path.suffix], token)
    length = 8 + int.from_bytes(data[:8], "little")
    if path.suffix == ".safetensors" and len(data) < length < min(size, MAX_HEADER_BYTES):
        data = _first_bytes(url, length, token)
    with path.open("wb") as out:
        out.write(data)
        out.truncate(size)


def _first_bytes(url: str, num: int, token: str | None) -> bytes:
    headers, data = {**build_hf_headers(token=token or None), "range": f"bytes=0-{num - 1}"}, bytearray()
    with get_session().stream("GET", url, headers=headers) as reply:
        hf_raise_for_status(reply)
        for piece in reply.iter_bytes():
            data += piece
            if len(data) >= num:  # of a server that knows no ranges, too
                break
    return bytes(data[:num])


def _hub(token: str | None) -> HfApi:
    return HfApi(token=token or None, library_name="hex_llm")


@contextmanager
def _bounded_hub(repo: str, revision: str | None) -> Iterator[None]:
    """Inside, the hub library gives up in seconds, logs nothing, and raises SourceError or a disk's error."""
    # It becomes a path in the cache.
    if revision is not None and (".." in revision or revision.startswith("/")):
        raise SourceError(f"{revision!r} is no branch, tag or commit; check --revision")
    with ONE_AT_A_TIME:
        verbosity = hub_logging.get_verbosity()
        hub_logging.set_verbosity(logging.ERROR)
        usual = get_session()
        set_client_factory(partial(_client_like, usual, _Patience(repo, revision)))
        try:
            with refusals(partial(_hub_problem, repo=repo, revision=revision)):
                yield
        finally:
            set_client_factory(partial(_client_like, usual))
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
        self.silence_s = SILENCE_S if chosen == constants.DEFAULT_DOWNLOAD_TIMEOUT else chosen

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


def _client_like(usual: httpx2.Client, patience: _Patience | None = None) -> httpx2.Client:
    """A new one each time: the hub library closes its client, and makes another, when a connection fails."""
    client = type(usual)(follow_redirects=usual.follow_redirects, timeout=usual.timeout)
    client.event_hooks = usual.event_hooks
    if patience is not None:
        client.event_hooks["request"].append(patience.sending)
        client.event_hooks["response"].append(patience.answered)
    return client


def _asked(request: httpx2.Request) -> tuple[str, str, str | None]:
    return request.method, str(request.url), request.headers.get("range")


def _hub_problem(error: Exception, repo: str, revision: str | None) -> str:
    for cause in (error, error.__cause__):
        if isinstance(cause, HfHubHTTPError):
            code = cause.response.headers.get("x-error-code")
            return _hub_refusal(cause.response.status_code, code, repo, revision)
    if isinstance(error, HFValidationError):
        return f"{repo!r} is no name of the hub; give org/name"
    if constants.is_offline_mode():
        return (
            f"{repo} is not complete in the hub's cache and HF_HUB_OFFLINE is set; unset it once to fetch it"
        )
    return (
        f"{repo} is unavailable from the hub ({type(error.__cause__ or error).__name__}); check the network "
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
