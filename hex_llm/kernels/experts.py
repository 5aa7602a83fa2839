"""The routed experts of a feed-forward, and how tokens choose them: one signature of each for all platforms,
chosen once; and one form of it.

None knows that the width of experts may be split over devices.

A *pair* is a token with one of the experts that it chose: number token * k + choice, of P = T * k. Letters of
shapes: E experts, k of them for each token; the others as in kernels/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax

Activation = Callable[[Array], Array]


class Choice(NamedTuple):
    """What a router's logits mean."""

    scored: Activation  # makes scores of them, along the last axis
    num: int  # of experts for a token
    normalized: bool  # the scores of those that are chosen
    scale: float
    logit_scale: float = 1.0


class ChooseExperts(Protocol):
    """Those with the largest logits, or corrected scores, the largest first and among equals the first."""

    def __call__(self, logits: Array, correction: Array | None, choice: Choice) -> tuple[Array, Array]:
        """logits [T, E], correction [E] -> experts [T, k], and their scores [T, k] in float32."""
        ...


class ExpertOptions(NamedTuple):
    activation: Activation
    scale_input: bool  # scores scale the inputs of experts, not their outputs
    limit: float | None = None  # gates and ups end there, and 1 is added to ups
    bias: Array | None = None  # [E, 2, F], of gates and ups

    def gated(self, gate: Array, up: Array) -> Array:
        """What goes on to an expert's second matrix."""
        if self.limit is None:
            return self.activation(gate) * up
        return self.activation(jnp.minimum(gate, self.limit)) * (jnp.clip(up, -self.limit, self.limit) + 1)


class RoutedExperts(Protocol):
    """Runs every token through the experts that it chose, and combines their outputs."""

    def __call__(
        self,
        x: Array,  # [T, D]
        chosen: Array,  # [T, k], of a token all different
        scores: Array,  # [T, k] float32
        gate_up: Any,  # [E, 2, F, D]
        down: Any,  # [E, D, F]
        options: ExpertOptions,
    ) -> Array:
        """[T, D]"""
        ...


class ExpertKernels(NamedTuple):
    """What a platform has for them."""

    choose: ChooseExperts
    run: RoutedExperts


def choose(logits: Array, correction: Array | None, choice: Choice) -> tuple[Array, Array]:
    """See ChooseExperts."""
    logits = logits.astype(jnp.float32) * choice.logit_scale
    scores = choice.scored(logits)
    # Scores that are nearly 1 are told apart by the logits only.
    ranks = logits if correction is None else scores + correction
    _, chosen = lax.top_k(ranks, choice.num)
    scores = jnp.take_along_axis(scores, chosen, axis=-1)
    if choice.normalized:
        scores = scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, scores * choice.scale


def by_expert(chosen: Array, num_experts: int) -> tuple[Array, Array]:
    """Pairs [P] in the order of their experts, and [E] where the pairs of each expert end among them."""
    flat = chosen.reshape(-1)
    ends = jnp.sum(flat <= jnp.arange(num_experts)[:, None], axis=1, dtype=jnp.int32)
    return jnp.argsort(flat, stable=True).astype(jnp.int32), ends


def dense(
    x: Array, chosen: Array, scores: Array, gate_up: Array, down: Array, options: ExpertOptions
) -> Array:
    """See RoutedExperts. All experts see all tokens: the oracle, and for what there is no other form."""
    rows = jnp.arange(len(x))[:, None]
    spread = jnp.zeros((len(x), len(gate_up)), jnp.float32).at[rows, chosen].set(scores)
    weights = spread.astype(x.dtype).T[:, :, None]  # [E, T, 1]
    inputs = x * weights if options.scale_input else jnp.broadcast_to(x, (len(gate_up), *x.shape))
    hidden = jnp.einsum("etd,ecfd->cetf", inputs, gate_up)
    if options.bias is not None:
        hidden += options.bias.swapaxes(0, 1)[:, :, None]
    hidden = options.gated(hidden[0], hidden[1])
    if not options.scale_input:
        hidden = hidden * weights
    return jnp.einsum("etf,edf->td", hidden, down)


def combined(expert_out: Array, num_tokens: int) -> Array:
    """[P, D] -> [T, D]: of each token's pairs, always in the same order."""
    parts = expert_out.reshape(num_tokens, -1, expert_out.shape[-1])
    return sum((parts[:, i] for i in range(1, parts.shape[1])), parts[:, 0])
