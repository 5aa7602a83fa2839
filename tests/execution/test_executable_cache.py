"""Programs that are kept for the next start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from hex_llm.engine.loading import build_engine, open_files
from hex_llm.execution import executable_cache as kept
from hex_llm.execution.executable_cache import FORGOTTEN_S, ExecutableCache
from hex_llm.execution.runner import keep_compiled
from tests.engine import driving
from tests.engine.driving import drive, make_config, request
from tests.tiny import FAMILIES

TINY = next(one for one in FAMILIES if one.name == "llama3")
X = jnp.arange(4.0)
CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def doubled() -> Any:
    """Compiled here and now: on CPUs what JAX's own cache gives back is serialized without its functions."""
    with without_cache():
        return jax.jit(lambda x: (x * 2, x + 1), donate_argnums=0).lower(X).compile()


@contextmanager
def without_cache() -> Iterator[None]:
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # or it would not ask again whether it is wanted
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def keeper(folder: Path, *made_from: Any) -> ExecutableCache:
    return ExecutableCache(folder, jax.devices()[:1], *made_from)


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
    old, used = tmp_path / "old", tmp_path / "used"
    long_ago = time.time() - FORGOTTEN_S - 1
    for path in (old, used):
        path.touch()
        os.utime(path, (long_ago, long_ago))
    used.touch()
    keeper(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_what_jax_compiled_is_only_loaded_from_where_nobody_else_writes(tmp_path: Path, mode: int) -> None:
    chosen = tmp_path / "chosen"
    before = {name: jax.config.values[name] for name in CACHE}
    chosen.mkdir()
    chosen.chmod(mode)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    try:
        keep_compiled(tmp_path / "ours")
        used = Path(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert used == (chosen if mode == 0o700 else tmp_path / "ours" / "compiled")


class Shelf:
    """Stands in for JAX's serialization, since programs are not kept on CPUs, of which it is not sure."""

    def __init__(self) -> None:
        self.programs: list[Any] = []

    def serialize(self, program: Any) -> tuple[bytes, None, None]:
        self.programs.append(program)
        return str(len(self.programs) - 1).encode(), None, None

    def load(self, data: bytes, in_tree: Any, out_tree: Any, *_: Any, **__: Any) -> Any:
        program = self.programs[int(data)]
        assert (in_tree, out_tree) == (program.in_tree, program.out_tree)
        return program


@pytest.mark.slow
def test_the_second_engine_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, folder = Shelf(), tmp_path / "programs"
    monkeypatch.setattr(kept, "serialize", shelf.serialize)
    monkeypatch.setattr(kept, "deserialize_and_load", shelf.load)
    TINY.save(tmp_path / "model")
    folder.mkdir()

    def tokens(**flags: Any) -> list[int]:
        config = make_config(tmp_path / "model", max_decode_seqs=2, max_model_len=64, **flags)
        engine = build_engine(config, open_files(config), None, kept_in=folder)
        engine.warm_up()
        return driving.tokens(drive(engine, [request("a", TINY.prompt(0))])["a", 0])

    first, num_compiled = tokens(), len(shelf.programs)
    assert num_compiled == len(list(folder.iterdir())) > 0
    assert tokens() == first
    assert len(shelf.programs) == num_compiled
    assert tokens(num_blocks=65) == first  # other shapes are other programs
    assert len(shelf.programs) > num_compiled
