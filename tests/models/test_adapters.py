"""A matrix around another that adds each row's own adapter, against float64; and where modules go in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.kernels.adapters import Owners
from hex_llm.models.adapters import Adapted, SlotMatrices, adaptable, module_names
from hex_llm.models.families import model_spec
from hex_llm.models.linear import Dense
from hex_llm.models.params import Rounding
from hex_llm.models.quantized import quantize
from tests.kernels.lowering import lowered_for_gpus
from tests.tiny import FAMILIES

NUM_SLOTS, RANKS, WIDTH = 3, 4, 32
WHICH = jnp.asarray([0, 2, 1, 3, 0, 2, 2])


def adapted(form: str, *outputs: int) -> Adapted:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) / 4)

    base: Any = Dense(normal(*outputs, WIDTH), len(outputs))
    slots = SlotMatrices(normal(NUM_SLOTS, RANKS, WIDTH), normal(*outputs, NUM_SLOTS, RANKS))
    return Adapted(base if form == "dense" else quantize(base, Rounding(8, 16)), slots, Owners(WHICH))


def merged(matrix: Adapted, row: int) -> Any:
    """What its weights are for a row, [*outputs, WIDTH] in float64."""
    weight = np.asarray(matrix.base.expanded(jnp.float32).array, np.float64)
    slot = int(WHICH[row])
    if not slot:
        return weight
    down, up = (np.asarray(part, np.float64) for part in (matrix.slots.down, matrix.slots.up))
    return weight + up[..., slot - 1, :] @ down[slot - 1]


@pytest.mark.parametrize("form", ["dense", "quantized"])
def test_each_row_has_its_own(form: str) -> None:
    x = np.random.default_rng(1).standard_normal((len(WHICH), WIDTH), dtype=np.float32)
    heads, gates, table = (adapted(form, *outputs) for outputs in ((5, 3, 2), (6, 2), (9,)))
    out, gated, tokens = heads.matmul(x), gates.gated(x, jax.nn.silu), jnp.asarray([8, 0, 3, 3, 1, 2, 7])
    rows = table.rows(tokens)
    for i, row in enumerate(x.astype(np.float64)):
        np.testing.assert_allclose(out[i], merged(heads, i) @ row, atol=1e-4)
        gate, up = (merged(gates, i) @ row).T
        np.testing.assert_allclose(gated[i], gate / (1 + np.exp(-gate)) * up, atol=1e-4)
        np.testing.assert_allclose(rows[i], merged(table, i)[tokens[i]], atol=1e-4)


def test_who_has_none_gets_the_base_to_the_last_bit() -> None:
    x = np.random.default_rng(1).standard_normal((len(WHICH), WIDTH), dtype=np.float32)
    matrix = adapted("dense", 8)
    np.testing.assert_array_equal(matrix.matmul(x)[WHICH == 0], matrix.base.matmul(x)[WHICH == 0])


def test_products_with_adapters_lower_for_gpus() -> None:
    matrix = jax.tree.map(lambda array: array.astype(jnp.bfloat16), adapted("dense", 6, 2))
    matrix = Adapted(matrix.base, matrix.slots, Owners(WHICH))
    text = lowered_for_gpus(lambda m, x: m.gated(x, jax.nn.silu), matrix, jnp.zeros((7, WIDTH), jnp.bfloat16))
    assert text.count("dot_general") == 3, "the base, and the two of all slots"


@pytest.mark.parametrize("tiny", FAMILIES, ids=lambda tiny: tiny.name)
def test_every_linear_module_has_a_place(tiny: Any) -> None:
    """But those of routed experts; also the head of a model whose head is its embedding."""
    config = tiny.config()
    spec = model_spec({**config.to_dict(), "architectures": [tiny.architecture]})
    names = [name for matrix in adaptable(spec).values() for name in module_names(matrix)]
    assert len(set(names)) == len(names)
    assert names[0].endswith("embed_tokens")
    assert names[-1].endswith("lm_head")
    attention = 2 if spec.names.fused else 4
    widths = {True: 2, False: 3}[spec.names.fused]
    dense = sum(layer.experts is None or layer.experts.shared_size is not None for layer in spec.layers)
    num_alike = sum(layer.keys_as_values for layer in spec.layers)
    assert len(names) == 2 + attention * len(spec.layers) - num_alike + widths * dense
