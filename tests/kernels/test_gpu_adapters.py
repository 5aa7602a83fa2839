"""What adapters add on GPUs, interpreted where there is none, beside the form that asks all slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels import gpu_adapter_tiles
from hex_llm.kernels.adapters import Fused, Norm, Owners
from hex_llm.kernels.gpu_adapter_tiles import Tiling
from hex_llm.kernels.gpu_adapters import FEW_ROWS, add_adapters, join_adapters, ranks_of_rows
from hex_llm.kernels.gpu_launch import quick
from hex_llm.models import decoder
from hex_llm.models.adapters import add_by_all
from tests.kernels.lowering import lowered_for_gpus


class Case(NamedTuple):
    which: list[int]
    outputs: tuple[int, ...] = (40,)
    num_inputs: int = 256
    num_slots: int = 3
    num_ranks: int = 16
    fused: Fused = Fused()
    dtype: Any = jnp.float32


DECODES = [0, 2, 1, 3, 0, 2, 2] * 3
PROMPTS = [2] * 50 + [0] * 30 + [1] * 70 + [3] + [0] * 90 + [3] * 20 + [1]  # more than a few tiles
CASES = {
    "decodes": Case(DECODES, (5, 3, 4)),
    "heads": Case(DECODES, (2, 4, 32), fused=Fused(1, (2, 3))),
    "heads of few": Case(DECODES[:7], (2, 4, 32), fused=Fused(1, (2, 3))),
    "heads of prompts": Case(PROMPTS, (2, 3, 128), fused=Fused(1, (1, 2))),
    "heads of 80": Case(PROMPTS, (2, 4, 80), fused=Fused(1, (2, 3))),
    "more slots than are asked at once": Case([0, 7, 20, 1] * 4, (9000,), 64, num_slots=20),
    "many outputs": Case(DECODES, (9000,), 64, num_ranks=24),
    "one": Case([2], num_ranks=4),
    "inputs and ranks that fill nothing": Case(DECODES, num_inputs=200, num_ranks=24),
    "the same of few": Case([1, 0, 3], num_inputs=200, num_ranks=24),
    "prompts": Case(PROMPTS),
    "nobody has one": Case([0] * 16, num_slots=1),
    "inputs that are shared": Case(DECODES, num_inputs=2048),
    "a half": Case(PROMPTS, num_inputs=1024, dtype=jnp.bfloat16),
}


def arrays(case: Case) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) / 4, case.dtype)

    num = len(case.which)
    out, x = normal(num, *case.outputs), normal(num, case.num_inputs)
    down = normal(case.num_slots, case.fused.num_modules * case.num_ranks, case.num_inputs)
    up = normal(*case.outputs, case.num_slots, case.num_ranks)
    return out, x, down, up, case.fused, Owners(jnp.asarray(case.which, jnp.int32))


def both_forms(given: tuple[Any, ...], *activation: Any) -> tuple[jax.Array, jax.Array]:
    """The kernel's, and what is expected; compiled together."""
    *arrays, up, fused, which = given

    def run(which: Owners, up: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        got = add_adapters(*arrays, slots_first(up), fused, which, *activation)
        return got, add_by_all(*arrays, up, fused, which, *activation)

    return jax.jit(run)(which, up, *arrays)


def slots_first(up: jax.Array) -> jax.Array:
    return jnp.moveaxis(up, -2, 0)


@pytest.mark.parametrize("name", CASES)
def test_each_row_has_its_own(name: str) -> None:
    given = arrays(CASES[name])
    tolerance = 1e-4 if CASES[name].dtype == jnp.float32 else 0.1
    got, expected = both_forms(given)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(*(np.asarray(one, np.float32) for one in (got, expected)), atol=tolerance)
    without = np.asarray(given[-1].which) == 0
    np.testing.assert_array_equal(np.asarray(got)[without], np.asarray(given[0])[without])


@pytest.mark.parametrize("fused", [Fused(), Fused(1, (1,))])
@pytest.mark.parametrize("which", [[0, 2, 1], DECODES, PROMPTS])
def test_gates(which: list[int], fused: Fused) -> None:
    given = arrays(Case(which, (70, 2), fused=fused))
    got, expected = both_forms(given, jax.nn.silu)
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_ranks", [16, 24])
def test_gates_and_the_ranks_behind_them(num_ranks: int, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two stretches to a program, the last of which are not full."""
    monkeypatch.setattr(gpu_adapter_tiles, "MIN_PROGRAMS", 1)
    case = Case(PROMPTS, (700, 2), fused=Fused(1, (1,)), num_ranks=num_ranks, dtype=dtype)
    out, x, down, up, fused, which = arrays(case)
    following = arrays(Case(PROMPTS, (1,), 700, num_ranks=8, dtype=dtype))[2]
    tiling = Tiling(64, 128, 2, 4, 2)

    def run(which: Owners, *arrays: jax.Array) -> Any:
        *given, up, following = arrays
        made = add_adapters(*given, slots_first(up), fused, which, jax.nn.silu, following, second=tiling)
        expected = add_by_all(*given, up, fused, which, jax.nn.silu)
        return made, expected, ranks_of_rows(made.x, following, which)

    made, expected, ranks = jax.jit(run)(which, out, x, down, up, following)
    exact = dtype == jnp.float32
    np.testing.assert_allclose(
        *(np.asarray(one, np.float32) for one in (made.x, expected)), atol=1e-4 if exact else 0.2
    )
    assert made.ranks.shape == (1, len(PROMPTS), 8)
    has_one = np.asarray(which.which) > 0
    ours, theirs = (np.asarray(one, np.float32).sum(0)[has_one] for one in (made.ranks, ranks))
    np.testing.assert_allclose(ours, theirs, atol=1e-3 if exact else 0.1)


@pytest.mark.parametrize("which", [[0, 2, 1], DECODES, PROMPTS])
@pytest.mark.parametrize("activation", [None, jax.nn.silu])
def test_lowers_for_gpus(which: list[int], activation: Any) -> None:
    case = Case(which, (64, 2), 1024, 16, 16, Fused(1, (1,)), jnp.bfloat16)
    *matrices, up, fused, slots = arrays(case)
    matrices.append(slots_first(up))
    following = jnp.ones((16, 16, 64), jnp.bfloat16)
    text = lowered_for_gpus(
        lambda *given: add_adapters(*given, fused, slots, activation, following), *matrices
    )
    assert text.count("triton") >= 2


@pytest.mark.parametrize("which", [[0, 2, 1], DECODES, PROMPTS])
@pytest.mark.parametrize("width", [96, 1100])
def test_joined_to_what_goes_around(which: list[int], width: int) -> None:
    out, x, down, up, fused, slots = arrays(Case(which, (width,)))
    around, norm = jnp.flip(out), Norm(out[0], 1e-5, 0.5)

    def run(
        around: jax.Array, out: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, slots: Any
    ) -> Any:
        expected = around + add_by_all(out, x, down, up, fused, slots)
        normed = decoder.normalize(expected, norm.eps) * (norm.weight + norm.offset)
        return join_adapters(around, out, x, down, slots_first(up), slots, norm), (expected, normed)

    (got, normed), expected = jax.jit(run)(around, out, x, down, up, slots)
    np.testing.assert_allclose(got, expected[0], atol=1e-4)
    assert (normed is None) == (len(which) > FEW_ROWS)
    if normed is not None:
        np.testing.assert_allclose(normed, expected[1], atol=1e-4)


def test_joining_lowers_for_gpus() -> None:
    out, x, down, up, _, slots = arrays(Case(DECODES, (96,), 1024, 16, 16, dtype=jnp.bfloat16))
    norm = Norm(out[0], 1e-5, 0.0)
    given = (out, x, down, slots_first(up))
    text = lowered_for_gpus(lambda out, *given: join_adapters(out, out, *given, slots, norm), *given)
    assert "triton" in text


def test_a_quick_activation_is_the_same() -> None:
    x = jnp.concatenate([jnp.linspace(-200.0, 200.0, 4001), jnp.array([-jnp.inf, jnp.inf, 0.0])])
    got, expected = quick(jax.nn.silu)(x), jax.nn.silu(x)
    finite = jnp.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-5, atol=1e-30)
    assert got[-2] == jnp.inf
    assert quick(jax.nn.relu) is jax.nn.relu
