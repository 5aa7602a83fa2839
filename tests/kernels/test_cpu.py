"""The CPU's product of matrices against numpy's in float64, and what happens where it cannot be compiled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import cpu

WIDTH = cpu.panel_width() or 0
needs_compiler = pytest.mark.skipif(not WIDTH, reason="there is no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 63, 64, 65, 130])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (48, 7), (50, 513), (333, 1100), (64, 2048)])
def test_product(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, num_inputs), dtype=np.float32)
    weight = rng.standard_normal((num_outputs, num_inputs), dtype=np.float32)
    got = np.asarray(cpu.to_panels(jnp.asarray(weight), 1, WIDTH).matmul(jnp.asarray(x)))
    expected = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(got, expected, atol=2e-6 * num_inputs**0.5 * 3)


@needs_compiler
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((67, 700), dtype=np.float32))
    weight = cpu.to_panels(jnp.asarray(rng.standard_normal((100, 700), dtype=np.float32)), 1, WIDTH)
    together = np.asarray(weight.matmul(x))
    for i in (0, 3, 4, 63, 64, 66):
        np.testing.assert_array_equal(together[i], np.asarray(weight.matmul(x[i : i + 1]))[0])


@needs_compiler
def test_shapes_and_rows() -> None:
    weight = jnp.arange(5 * 2 * 3 * 4, dtype=jnp.float32).reshape(5, 2, 3, 4)
    panels = cpu.to_panels(weight, 2, WIDTH)
    x = jnp.ones((3, 12))
    expected = jnp.einsum("tij,abij->tab", x.reshape(3, 3, 4), weight)
    np.testing.assert_allclose(panels.matmul(x), expected)
    np.testing.assert_allclose(cpu.to_panels(weight, 2, WIDTH, turned=True).matmul(x), expected)
    np.testing.assert_array_equal(
        panels.rows(jnp.array([9, 0, 3])), weight.reshape(10, 12)[np.array([9, 0, 3])]
    )


@needs_compiler
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_gated(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((num_rows, 50), dtype=np.float32)) * 10  # far out on both sides
    weight = jnp.asarray(rng.standard_normal((2 * WIDTH, 2, 50), dtype=np.float32))
    panels = cpu.to_panels(weight, 2, WIDTH, turned=True)
    assert panels.can_gate
    assert not cpu.to_panels(weight[:-1], 2, WIDTH, turned=True).can_gate
    gates, ups = np.einsum("td,fcd->ctf", np.float64(x), np.float64(weight))
    with np.errstate(over="ignore"):
        expected = gates / (1 + np.exp(-gates)) * ups
    np.testing.assert_allclose(panels.gated(x, jax.nn.silu), expected, rtol=1e-4, atol=1e-3)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What is known about the kernels, during the test."""
    cpu.panel_widths.cache_clear()
    yield
    cpu.panel_widths.cache_clear()


def test_without_a_compiler(
    forgotten: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu.shutil, "which", lambda _: None)
    assert cpu.panel_width() is None
    assert "no C++ compiler" in caplog.text


def test_with_a_compiler_that_fails(
    forgotten: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "FLAGS", ("--no-such-flag",))
    monkeypatch.setattr(cpu.shutil, "which", lambda _: "/bin/false")
    assert cpu.panel_width() is None
    assert "about half as fast" in caplog.text


# ---- what is loaded runs as we do


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The paths of libraries that are loaded; JAX's cache is in `kept`, and nothing is compiled."""
    paths: list[Path] = []

    def load(path: str) -> None:
        paths.append(Path(path))
        assert paths[-1].exists()
        raise OSError("not in this test")

    def compile_nothing(command: list[str], **_: object) -> None:
        Path(command[-1]).touch()

    monkeypatch.setattr(cpu.ctypes, "CDLL", load)
    monkeypatch.setattr(cpu.subprocess, "run", compile_nothing)
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "kept"))
    cpu.panel_widths.cache_clear()
    yield paths
    cpu.panel_widths.cache_clear()
    jax.config.update("jax_compilation_cache_dir", before)


@needs_compiler
def test_a_library_is_kept_in_a_folder_that_is_ours(tmp_path: Path, loaded: list[Path]) -> None:
    assert cpu.panel_width() is None
    assert loaded[0].parent == tmp_path / "kept"


@needs_compiler
@pytest.mark.parametrize("whose", ["anyone's", "another's", "in anyone's"])
def test_no_library_is_loaded_from_where_others_may_write(
    tmp_path: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    if whose == "another's":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        (folder if whose == "anyone's" else tmp_path).chmod(0o777)
    assert cpu.panel_width() is None
    assert len(loaded) == 1
    assert not list(folder.iterdir())
    assert not loaded[0].parent.exists(), "what is loaded once is not left behind"
