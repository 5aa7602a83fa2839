"""Mixture of experts: choose, run, add up. An expert's width is split over devices like a dense layer's."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hex_llm.models.linear import linear
from hex_llm.models.spec import Experts


def expert_scores(logits: jax.Array, experts: Experts) -> jax.Array:
    """[T, E] -> [T, E]: the weight of each expert for each token, 0 for those not chosen."""
    values, chosen = jax.lax.top_k(logits.astype(jnp.float32), experts.num_per_token)
    # A softmax over all experts, renormalised over the chosen, is a softmax over the chosen.
    values = jax.nn.sigmoid(values) if experts.sigmoid_input else jax.nn.softmax(values, axis=-1)
    rows = jnp.arange(len(logits))[:, None]
    return jnp.zeros(logits.shape, jnp.float32).at[rows, chosen].set(values)


def moe(
    x: jax.Array,
    router: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    experts: Experts,
    activation: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """x [T, D], router [E, D], gate_up [E, F, 2, D], down [E, D, F] -> [T, D]; all experts see all tokens."""
    scores = expert_scores(linear(x, router), experts).astype(x.dtype).T[:, :, None]  # [E, T, 1]
    inputs = x * scores if experts.sigmoid_input else jnp.broadcast_to(x, (experts.num, *x.shape))
    hidden = jnp.einsum("etd,efcd->cetf", inputs, gate_up)
    hidden = activation(hidden[0]) * hidden[1]
    if not experts.sigmoid_input:
        hidden = hidden * scores
    return jnp.einsum("etf,edf->td", hidden, down)
