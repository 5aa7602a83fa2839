"""The routed experts of a feed-forward: one signature for all platforms, chosen once; and one form of it.

It does not know how experts are chosen, nor that their width may be split over devices.

A *pair* is a token with one of the experts that it chose: number token * k + choice, of P = T * k. Letters of
shapes: E experts, k of them for each token; the others as in kernels/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


class RoutedExperts(Protocol):
    """Runs every token through the experts that it chose, and combines their outputs."""

    def __call__(
        self,
        x: jax.Array,  # [T, D]
        chosen: jax.Array,  # [T, k], of a token all different
        scores: jax.Array,  # [T, k] float32
        gate_up: Any,  # [E, 2, F, D]
        down: Any,  # [E, D, F]
        *,
        activation: Activation,
        scale_input: bool,  # scores scale the inputs of experts, not their outputs
    ) -> jax.Array:
        """[T, D]"""
        ...


def by_expert(chosen: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Pairs [P] in the order of their experts, and [E] where the pairs of each expert end among them."""
    flat = chosen.reshape(-1)
    ends = jnp.sum(flat <= jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    return jnp.argsort(flat, stable=True).astype(jnp.int32), ends


def dense(
    x: jax.Array,
    chosen: jax.Array,
    scores: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    activation: Activation,
    scale_input: bool,
) -> jax.Array:
    """See RoutedExperts. All experts see all tokens: the oracle, and for what there is no other form."""
    rows = jnp.arange(len(x))[:, None]
    spread = jnp.zeros((len(x), len(gate_up)), jnp.float32).at[rows, chosen].set(scores)
    weights = spread.astype(x.dtype).T[:, :, None]  # [E, T, 1]
    inputs = x * weights if scale_input else jnp.broadcast_to(x, (len(gate_up), *x.shape))
    hidden = jnp.einsum("etd,ecfd->cetf", inputs, gate_up)
    hidden = activation(hidden[0]) * hidden[1]
    if not scale_input:
        hidden = hidden * weights
    return jnp.einsum("etf,edf->td", hidden, down)


def combined(expert_out: jax.Array, num_tokens: int) -> jax.Array:
    """[P, D] -> [T, D]: of each token's pairs, always in the same order."""
    parts = expert_out.reshape(num_tokens, -1, expert_out.shape[-1])
    return sum((parts[:, i] for i in range(1, parts.shape[1])), parts[:, 0])
