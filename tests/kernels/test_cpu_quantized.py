"""The CPU's product of quantized matrices against numpy's in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import cpu
from hex_llm.kernels.cpu_quantized import QuantizedPanels, block_of, to_quantized_panels

WIDTH = cpu.quantized_panel_width() or 0
pytestmark = pytest.mark.skipif(not WIDTH, reason="there is no C++ compiler, or no product of bytes")

KINDS = {  # bits, group, zero, offsets, whether scales fit float16
    "Q4_0": (4, 32, 8, False, True),
    "Q4_1": (4, 32, 0, True, True),
    "Q4_K": (4, 32, 0, True, False),
    "AWQ": (4, 128, 0, True, False),
    "Q8_0": (8, 32, 0, False, True),
    "Q6_K": (8, 16, 0, False, False),
    "int8 by row": (8, 256, 0, False, False),
    "Q5_1": (8, 32, 0, True, True),
}


def make(
    kind: str, outputs: tuple[int, ...], num_inputs: int, turned: bool = False
) -> tuple[QuantizedPanels, np.ndarray]:
    """Random ones, and the weights [*outputs, inputs] that they stand for."""
    bits, group, zero, has_offsets, is_half = KINDS[kind]
    rng = np.random.default_rng(num_inputs)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = rng.integers(low, high, (*outputs, num_inputs)).astype(np.uint8 if bits == 4 else np.int8)
    scales, offsets = rng.uniform(-0.02, 0.02, (2, *outputs, num_inputs // group)).astype(
        np.float16 if is_half else np.float32
    )
    weights = (codes.astype(np.float64) - zero) * scales.astype(np.float64).repeat(group, -1)
    if has_offsets:
        weights += offsets.astype(np.float64).repeat(group, -1)
    panels = to_quantized_panels(
        jnp.asarray(codes),
        jnp.asarray(scales, jnp.float32),
        jnp.asarray(offsets, jnp.float32) if has_offsets else None,
        num_output_axes=len(outputs),
        bits=bits,
        zero=zero,
        width=WIDTH,
        turned=turned,
    )
    assert panels.is_half == is_half
    return panels, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"),
    [(50, 512), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((1, 256), (64, 768)))],
)
def test_product(kind: str, num_outputs: int, num_inputs: int) -> None:
    """Rows of floats lose 16 bits' rounding, as much as of the largest of their block."""
    panels, weights = make(kind, (num_outputs,), num_inputs)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((70, num_inputs)).astype(np.float32)
    x[:, ::32] *= 30  # one in each block is far out
    for num_rows in (1, 2, 3, 4, 5, 70):
        rows = x[:num_rows]
        lost = np.abs(rows).max() / (127 * 256) * np.sqrt((weights**2).sum(-1)).max()
        got = np.asarray(panels.matmul(jnp.asarray(rows)))
        np.testing.assert_allclose(got, rows.astype(np.float64) @ weights.T, rtol=0, atol=3 * lost)
    np.testing.assert_allclose(panels.rows(jnp.arange(num_outputs)), weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_row_does_not_depend_on_its_neighbours(kind: str) -> None:
    panels, _ = make(kind, (100,), 256)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((67, 256), dtype=np.float32))
    together = np.asarray(panels.matmul(x))
    for i in (0, 3, 4, 63, 64, 66):
        np.testing.assert_array_equal(together[i], np.asarray(panels.matmul(x[i : i + 1]))[0])


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_gates_and_ups(kind: str) -> None:
    panels, weights = make(kind, (2 * WIDTH, 2), 256, turned=True)
    assert panels.can_gate
    x = np.random.default_rng(0).standard_normal((5, 256)).astype(np.float32)
    both = np.einsum("td,fcd->tfc", x.astype(np.float64), weights)
    np.testing.assert_allclose(panels.matmul(jnp.asarray(x)), both, rtol=0, atol=1e-2)
    gates, ups = both[..., 0], both[..., 1]
    expected = gates / (1 + np.exp(-gates)) * ups
    np.testing.assert_allclose(panels.gated(jnp.asarray(x), jax.nn.silu), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_what_is_not_finite_shows_in_its_row_alone(kind: str, bad: float) -> None:
    panels, _ = make(kind, (50,), 256)
    x = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    x[2, 77], x[3] = bad, 0
    got = np.asarray(panels.matmul(jnp.asarray(x)))
    assert not np.isfinite(got[2]).any()
    assert np.isfinite(got[[0, 1, 3, 4, 5]]).all()
    assert not got[3].any()


def test_blocks_must_fit_groups() -> None:
    assert [block_of(4, group) for group in (16, 32, 48, 64)] == [None, 32, None, 32]
    assert [block_of(8, group) for group in (8, 16, 48, 64)] == [None, 16, 16, 32]
