"""Turns what the user named as model or tokenizer — nothing, a path, gs://…, a hub name — into local files.

Knows the places that files come from; does not know what is in them. Whatever goes wrong is a SourceError
of one line, soon: a server that is silent or refuses twice is not asked again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hex_llm.config import EngineConfig
from hex_llm.errors import SourceError
from hex_llm.weights.bucket import fetch_from_bucket
from hex_llm.weights.default_model import fetch_default
from hex_llm.weights.files import (
    CONFIG,
    MODEL,
    TOKENIZER,
    WantedFiles,
    choose,
    disk_problem,
    folder_or_gguf,
    like,
)

HUB_NAME = re.compile(
    r"(?P<repo>(?:\w[\w.-]*/)?\w[\w.-]*)(?:@(?P<commit>[0-9a-f]{40}))?(?::(?P<file>.+\.gguf))?", re.ASCII
)


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
    with _disk_problems(model):
        if model is not None and (name := _hub_name(model)):
            from hex_llm.weights.hub import fetch_from_hub  # 0.3 s that local models need not wait

            return fetch_from_hub(name["repo"], name["file"], name["commit"] or revision, token, wish)
        if revision is not None:
            raise SourceError(f"--revision {revision!r} is only for models of the hub; leave it out")
        if model is None:
            return fetch_default(private_folder(cache_dir / "default"))
        if model.startswith("gs://"):
            return fetch_from_bucket(model, private_folder(cache_dir / "gs"), wish)
        return _from_disk(model, wish)


def fetch_headers(config: EngineConfig, folder: Path) -> tuple[Path, bool]:
    """What `fetch` gives for the config's model, without its weights where these are far away: of the hub's,
    the headers, put into `folder`; of a bucket's, and where there are none, only config.json, which True
    tells."""
    model = config.model
    if model is not None and (name := _hub_name(model)):
        from hex_llm.weights.hub import headers_from_hub

        with _disk_problems(model):
            commit = name["commit"] or config.revision
            return headers_from_hub(name["repo"], name["file"], commit, config.hf_token, MODEL, folder), False
    if model is not None and Path(model).suffix == ".json":
        (folder / "config.json").symlink_to(Path(model).expanduser().absolute())
        return folder, True
    path = os.path.expanduser(model or "")
    is_bare = os.path.isdir(path) and not like(os.listdir(path), "*.safetensors", "*.gguf")
    config_only = is_bare or (model or "").startswith("gs://")
    return fetch_for(config, model, config_only=config_only), config_only


def fetch_for(config: EngineConfig, model: str | None, **only: bool) -> Path:
    """`fetch` as a config wants it; `only` are its last options."""
    return fetch(model, revision=config.revision, token=config.hf_token, cache_dir=config.cache_dir, **only)


def pinned(config: EngineConfig) -> EngineConfig:
    """The same, with commits in its hub's names: what is fetched by it is of one version, whatever `main` or
    --revision come to mean later."""
    return replace(
        config, model=_at_commit(config.model, config), tokenizer=_at_commit(config.tokenizer, config)
    )


def _at_commit(model: str | None, config: EngineConfig) -> str | None:
    name = _hub_name(model) if model is not None else None
    if name is None or name["commit"]:
        return model
    from hex_llm.weights.hub import commit_of

    with _disk_problems(model):
        commit = commit_of(name["repo"], config.revision, config.hf_token)
    return f"{name['repo']}@{commit}" + (f":{name['file']}" if name["file"] else "")


@contextmanager
def _disk_problems(model: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceError(
            f"{model or 'the embedded default model'} is unavailable: {disk_problem(error)}"
        ) from error


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


def _hub_name(model: str) -> re.Match[str] | None:
    """The parts of a name to ask the hub for; None if it is there on the disk, or could only be there."""
    name = HUB_NAME.fullmatch(model)
    like_a_path = model.endswith(".gguf") and not (name and name["file"])
    is_here = os.path.exists(os.path.expanduser(model))
    return None if like_a_path or model.startswith("gs://") or is_here else name


def _from_disk(model: str, wish: WantedFiles) -> Path:
    path = Path(os.path.expanduser(model))
    if not os.path.exists(path):
        raise SourceError(
            f"there is no file or folder {model!r}; give an existing one, a hub name such as org/name, "
            "or gs://bucket/folder"
        )
    if path.is_dir():
        return folder_or_gguf([path / name for name in choose(os.listdir(path), wish, model, "/")])
    if path.is_file() and path.suffix == ".gguf":
        return path
    raise SourceError(f"{model!r} is neither a folder nor a .gguf file; give the folder that holds the model")
