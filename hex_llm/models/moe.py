"""Mixture of experts: which of them a token visits, and with what weight. What they do is a kernel's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hex_llm.kernels.experts import Activation, ExpertOptions, RoutedExperts
from hex_llm.models.linear import Dense, linear
from hex_llm.models.spec import Experts


def choose(logits: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """[T, E] -> the chosen experts of each token [T, k], and their scores [T, k] in float32."""
    values, chosen = jax.lax.top_k(logits.astype(jnp.float32), experts.num_per_token)
    # A softmax over all experts, renormalised over the chosen, is a softmax over the chosen.
    scores = jax.nn.sigmoid(values) if experts.sigmoid_input else jax.nn.softmax(values, axis=-1)
    return chosen, scores


def moe(
    x: jax.Array,
    router: jax.Array,
    gate_up: Any,
    down: Any,
    experts: Experts,
    activation: Activation,
    fused_moe: RoutedExperts,
) -> jax.Array:
    """x [T, D], router [E, D], gate_up [E, 2, F, D], down [E, D, F] -> [T, D]."""
    chosen, scores = choose(linear(x, Dense(router)), experts)
    gate_up, down = (_given(matrix, x.dtype) for matrix in (gate_up, down))
    return fused_moe(x, chosen, scores, gate_up, down, ExpertOptions(activation, experts.sigmoid_input))


def _given(matrix: Any, dtype: DTypeLike) -> Any:
    """What the kernel takes: an array, or what was laid out for it."""
    return matrix if isinstance(matrix, tuple) else matrix.expanded(dtype).array
