"""Mixture of experts: what a router's logits mean. Choosing by them, and what the chosen do, are kernels'."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hex_llm.kernels.experts import Activation, Choice, ExpertKernels, ExpertOptions
from hex_llm.models.linear import Dense, linear
from hex_llm.models.params import FeedForward
from hex_llm.models.quantized import Quantized
from hex_llm.models.spec import Experts


def moe(
    x: jax.Array,
    seen: jax.Array,
    w: FeedForward,
    experts: Experts,
    activation: Activation,
    expert_kernels: ExpertKernels,
) -> jax.Array:
    """x [T, D] -> [T, D], without the shared expert; `seen` [T, D]: what the router sees of it."""
    # A correction is of float32: so are then the numbers that it tells apart.
    exact = jnp.float32 if w.correction is not None else x.dtype
    logits = linear(seen.astype(exact), Dense(w.router.astype(exact)), w.router_bias)
    chosen, scores = expert_kernels.choose(logits, w.correction, choice_of(experts))
    if w.expert_scales is not None:
        scores = scores * w.expert_scales[chosen].astype(scores.dtype)
    gate_up, down = (_given(matrix, x.dtype) for matrix in (w.gate_up, w.down))
    options = ExpertOptions(activation, experts.scale_input, experts.limit, w.gate_up_bias)
    out = expert_kernels.run(x, chosen, scores, gate_up, down, options)
    if w.down_bias is None:
        return out
    # Here, since devices that share an expert's width would each add it.
    return out + jnp.einsum("tk,tkd->td", scores, w.down_bias[chosen]).astype(x.dtype)


def choice_of(experts: Experts) -> Choice:
    scored = jax.nn.sigmoid if experts.sigmoid else jax.nn.softmax
    return Choice(scored, experts.num_per_token, experts.normalized, experts.scale, experts.logit_scale)


def _given(matrix: Any, dtype: DTypeLike) -> Any:
    """What the kernel takes: an array, or what was laid out for it."""
    return matrix.expanded(dtype).array if isinstance(matrix, Dense | Quantized) else matrix
