"""Mixture of experts: which of them a token visits, and with what weight. What they do is a kernel's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hex_llm.kernels.experts import Activation, ExpertOptions, RoutedExperts
from hex_llm.models.linear import Dense, linear
from hex_llm.models.params import FeedForward
from hex_llm.models.quantized import Quantized
from hex_llm.models.spec import Experts


def choose(
    logits: jax.Array, experts: Experts, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """[T, E] -> the chosen experts of each token [T, k], and their scores [T, k] in float32."""
    logits = logits.astype(jnp.float32) * experts.logit_scale
    scores = jax.nn.sigmoid(logits) if experts.sigmoid else jax.nn.softmax(logits, axis=-1)
    # Scores that are nearly 1 are told apart by the logits only.
    ranks = logits if correction is None else scores + correction
    _, chosen = jax.lax.top_k(ranks, experts.num_per_token)
    scores = jnp.take_along_axis(scores, chosen, axis=-1)
    if experts.normalized:
        scores = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, scores * experts.scale


def moe(
    x: jax.Array,
    seen: jax.Array,
    w: FeedForward,
    experts: Experts,
    activation: Activation,
    fused_moe: RoutedExperts,
) -> jax.Array:
    """x [T, D] -> [T, D], without the shared expert; `seen` [T, D]: what the router sees of it."""
    # A correction is of float32: so are then the numbers that it tells apart.
    exact = jnp.float32 if w.correction is not None else x.dtype
    logits = linear(seen.astype(exact), Dense(w.router.astype(exact)), w.router_bias)
    chosen, scores = choose(logits, experts, w.correction)
    if w.expert_scales is not None:
        scores = scores * w.expert_scales[chosen].astype(scores.dtype)
    gate_up, down = (_given(matrix, x.dtype) for matrix in (w.gate_up, w.down))
    options = ExpertOptions(activation, experts.scale_input, experts.limit, w.gate_up_bias)
    out = fused_moe(x, chosen, scores, gate_up, down, options)
    if w.down_bias is None:
        return out
    # Here, since devices that share an expert's width would each add it.
    return out + jnp.einsum("tk,tkd->td", scores, w.down_bias[chosen]).astype(x.dtype)


def _given(matrix: Any, dtype: DTypeLike) -> Any:
    """What the kernel takes: an array, or what was laid out for it."""
    return matrix.expanded(dtype).array if isinstance(matrix, Dense | Quantized) else matrix
