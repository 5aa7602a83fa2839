"""Programs that are kept for the next start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from hex_llm.engine import kept
from hex_llm.engine.kept import FORGOTTEN_S, KeptPrograms, folder_for_programs
from hex_llm.engine.loading import build_engine, open_files
from hex_llm.errors import SourceError
from tests.engine import driving
from tests.engine.driving import drive, make_config, request
from tests.tiny import FAMILIES

TINY = next(one for one in FAMILIES if one.name == "llama3")
X = jnp.arange(4.0)


def doubled() -> Any:
    return jax.jit(lambda x: (x * 2, x + 1), donate_argnums=0).lower(X).compile()


def keeper(folder: Path, *made_from: Any) -> KeptPrograms:
    return KeptPrograms(folder, jax.devices()[:1], *made_from)


def test_a_program_is_found_by_what_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = keeper(tmp_path, "a")
    assert mine.load("double", (X,), (0, 0)) is None
    mine.save("double", doubled())
    found = keeper(tmp_path, "a").load("double", (X,), (0, 0))
    twice, more = found(jnp.arange(4.0))
    assert (twice.tolist(), more.tolist()) == ([0, 2, 4, 6], [1, 2, 3, 4])
    assert keeper(tmp_path, "b").load("double", (X,), (0, 0)) is None
    assert mine.load("triple", (X,), (0, 0)) is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert keeper(tmp_path, "a").load("double", (X,), (0, 0)) is None
    monkeypatch.undo()
    monkeypatch.setattr(kept, "SOURCES", [tmp_path])
    assert keeper(tmp_path, "a").load("double", (X,), (0, 0)) is None


def test_what_is_broken_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = keeper(tmp_path)
    mine.save("double", doubled())
    [file] = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert mine.load("double", (X,), (0, 0)) is None
    assert "could not be loaded" in caplog.text


def test_a_full_disk_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = keeper(tmp_path)
    tmp_path.rmdir()
    mine.save("double", doubled())
    assert "could not be kept" in caplog.text


def test_what_nobody_loads_is_forgotten(tmp_path: Path) -> None:
    old, used, other = tmp_path / "old", tmp_path / "used", tmp_path / "kernels.so"
    long_ago = time.time() - FORGOTTEN_S - 1
    for path in (old, used, other):
        path.touch()
        os.utime(path, (long_ago, long_ago))
    used.touch()
    keeper(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"used", "kernels.so"}


def test_the_second_engine_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TINY.save(tmp_path / "model")
    folder = tmp_path / "programs"
    folder.mkdir()

    def tokens(**flags: Any) -> list[int]:
        config = make_config(tmp_path / "model", max_decode_seqs=2, max_model_len=64, **flags)
        engine = build_engine(config, open_files(config), None, kept_in=folder)
        engine.warm_up()
        return driving.tokens(drive(engine, [request("a", TINY.prompt(0))])["a", 0])

    first = tokens()
    with monkeypatch.context() as second:
        second.setattr(KeptPrograms, "save", lambda *_: pytest.fail("something was compiled"))
        assert tokens() == first
    num_kept = len(list(folder.iterdir()))
    assert tokens(num_blocks=65) == first  # other shapes are other programs
    assert len(list(folder.iterdir())) > num_kept


@pytest.fixture
def jax_cache() -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("jax_cache")
def test_either_we_keep_programs_or_jax_does(tmp_path: Path) -> None:
    assert folder_for_programs(tmp_path) == tmp_path / "programs"
    assert folder_for_programs(tmp_path) == tmp_path / "programs"  # of another engine in this process
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "users"))
    assert folder_for_programs(tmp_path) is None
    tmp_path.chmod(0o777)
    with pytest.raises(SourceError, match="writable by others"):
        folder_for_programs(tmp_path)
