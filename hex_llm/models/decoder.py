"""The one forward pass of every model family: embed, blocks, logits.

It knows shapes and values only: not how weights were loaded or sharded, nor how a batch came about.
An absent weight (None) is an absent operation. Letters of shapes: see kernels/attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.attention import AttentionKernels, Batch, KVPages, Options, Projected
from hex_llm.kernels.experts import Activation, ExpertKernels
from hex_llm.kernels.matrix import Begun
from hex_llm.models.linear import Matrix, linear
from hex_llm.models.moe import moe
from hex_llm.models.params import FeedForward, LayerWeights, Weights
from hex_llm.models.rope import rope_table, rotate
from hex_llm.models.spec import Experts, Layer, ModelSpec, Rope

RopeTable = tuple[jax.Array, jax.Array]
Normed = Any  # tokens as a norm leaves them for who reads them next: an array [T, D], or float8.Rounded

ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: x * (0.5 * (1 + jax.lax.erf(x * 0.5**0.5))),  # jax.nn's is no word of Pallas on TPUs
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


def embed(spec: ModelSpec, weights: Weights, token_ids: jax.Array) -> jax.Array:
    """token_ids [T] -> [T, D]."""
    return scaled(weights.embed.rows(token_ids).astype(weights.norm.dtype), spec.embed_scale)


def forward(
    spec: ModelSpec,
    weights: Weights,
    x: jax.Array,
    rope_lengths: jax.Array,
    pages: list[KVPages],
    batch: Batch,
    attention_kernels: AttentionKernels,
    expert_kernels: ExpertKernels,
) -> tuple[jax.Array, jax.Array, list[KVPages]]:
    """Embeddings [T, D] -> the tokens [T, D] as they come to the last feed-forward, which `finished` is for,
    and as its norm leaves them; and the KV pages of every layer.

    `rope_lengths` [T]: the length that each token's rope frequencies are made for (rope.rope_table).
    """
    kernels = attention_kernels, expert_kernels
    *_, (last, normed, _) = states = list(attended(spec, weights, x, rope_lengths, pages, batch, *kernels))
    return last, normed, [layer_pages for _, _, layer_pages in states]


def finished(
    spec: ModelSpec,
    weights: Weights,
    x: jax.Array,
    normed: jax.Array | None,
    expert_kernels: ExpertKernels,
) -> jax.Array:
    """Hidden states [R, D] before the head, of those tokens alone that someone asks for; normed here, if they
    were not."""
    last = len(spec.layers) - 1
    normed = optional_norm(x, weights.layers[last].ffn_norm, spec) if normed is None else normed
    return after_layer(spec, weights, last, x, normed, expert_kernels)[1]


def attended(
    spec: ModelSpec,
    weights: Weights,
    x: jax.Array,
    rope_lengths: jax.Array,
    pages: list[KVPages],
    batch: Batch,
    attention_kernels: AttentionKernels,
    expert_kernels: ExpertKernels,
) -> Iterator[tuple[jax.Array, Normed, KVPages]]:
    """What each layer's `attention` leaves, given as `forward` is."""
    ropes = {layer.rope for layer in spec.layers if layer.rope}
    tables: dict[Rope | None, RopeTable] = {r: rope_table(r, batch.positions, rope_lengths) for r in ropes}
    normed: Normed = optional_norm(x, weights.layers[0].attn_norm, spec)
    for i, (layer, w) in enumerate(zip(spec.layers, weights.layers, strict=True)):
        if i:
            x, normed = after_layer(spec, weights, i - 1, x, normed, expert_kernels)
        given = x, normed, w, spec, layer, tables.get(layer.rope), pages[i], batch, attention_kernels
        is_last = i == len(spec.layers) - 1  # of its tokens some are taken
        x, normed, layer_pages = attention(*given, rounds=not is_last and feeds_rounded(layer, w))
        yield x, normed, layer_pages


def after_layer(
    spec: ModelSpec,
    weights: Weights,
    i: int,
    x: jax.Array,
    normed: Normed,
    expert_kernels: ExpertKernels,
) -> tuple[jax.Array, Normed]:
    """What layer i makes of the tokens that its attention left, and as the norm behind it leaves them."""
    following = next(iter(weights.layers[i + 1 : i + 2]), None)
    norm = weights.norm if following is None else following.attn_norm
    rounds = following is not None and following.qkv.takes_rounded
    return feed_forward(x, normed, weights.layers[i], norm, spec, spec.layers[i], expert_kernels, rounds)


def feeds_rounded(layer: Layer, w: LayerWeights) -> bool:
    """Whether a layer's feed-forward multiplies its tokens in 8 bits, and reads them not otherwise."""
    return layer.experts is None and w.ffn.gate_up.takes_rounded


def logits(spec: ModelSpec, lm_head: Matrix, hidden: jax.Array) -> jax.Array:
    """hidden [R, D] -> float32 [R, V]."""
    out = scaled(linear(hidden, lm_head).astype(jnp.float32), spec.logit_scale)
    if spec.logit_softcap is not None:
        out = jnp.tanh(out / spec.logit_softcap) * spec.logit_softcap
    return out


# Both are compiled inside the step, so that layers that are alike are traced and lowered once, not once each.
@partial(jax.jit, static_argnames=("spec", "layer", "attention_kernels", "rounds"))
def attention(
    x: jax.Array,
    normed: Normed,
    w: LayerWeights,
    spec: ModelSpec,
    layer: Layer,
    table: RopeTable | None,
    pages: KVPages,
    batch: Batch,
    attention_kernels: AttentionKernels,
    rounds: bool,
) -> tuple[jax.Array, Normed, KVPages]:
    """The first half of a decoder layer: tokens [T, D] in, and as its norm leaves them; both out for the
    second half, and the layer's KV pages."""
    options = Options(layer.mask, spec.attention_scale, spec.attn_softcap, w.sinks)
    attend, attend_projected = attention_kernels
    if attend_projected and is_plain(layer, w, spec):
        norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
        begun = w.qkv.begin(normed, w.qkv_bias)
        qkv, pending, dtype = begun or Begun(linear(normed, w.qkv, w.qkv_bias))
        heads = Projected(qkv, norms, table, spec.norm_eps, spec.norm_offset, pending, dtype)
        out, pages = attend_projected(heads, pages, batch, options)
    else:
        qkv = linear(normed, w.qkv, w.qkv_bias)  # [T, K, G+2, H]
        q, k, v = heads_of(qkv, w, spec, layer, table, batch)
        out, pages = attend(q, *contained(k, v), pages, batch, options)
    around = Around(w.attn_post_norm, w.ffn_norm, rounds)
    return *joined(x, out, w.out, w.out_bias, around, spec), pages


@partial(jax.jit, static_argnames=("spec", "layer", "expert_kernels", "rounds"))
def feed_forward(
    x: jax.Array,
    normed: Normed,
    w: LayerWeights,
    next_norm: jax.Array | None,
    spec: ModelSpec,
    layer: Layer,
    expert_kernels: ExpertKernels,
    rounds: bool,
) -> tuple[jax.Array, Normed]:
    """The second half, with the norm of who reads the tokens next."""
    around = Around(w.ffn_post_norm, next_norm, rounds, w.scale)
    if layer.experts is None:
        return joined(x, gated(normed, w.ffn, spec), w.ffn.down, w.ffn.down_bias, around, spec)
    return added(x, routed(x, normed, w.ffn, spec, layer.experts, expert_kernels), around, spec)


class Around(NamedTuple):
    """What is done to that which is added to the tokens, to them afterwards, and by whom they are read."""

    post_norm: jax.Array | None
    next_norm: jax.Array | None
    rounds: bool  # a matrix that multiplies floats of 8 bits reads what the norm leaves, and nobody else
    scale: jax.Array | None = None


def added(x: jax.Array, h: jax.Array, around: Around, spec: ModelSpec) -> tuple[jax.Array, jax.Array]:
    """The tokens with h, and as the next norm leaves them."""
    x = x + scaled(optional_norm(h, around.post_norm, spec), spec.residual_scale)
    x = x if around.scale is None else x * around.scale
    return x, optional_norm(x, around.next_norm, spec)


def joined(
    x: jax.Array, h: Any, weight: Matrix, bias: jax.Array | None, around: Around, spec: ModelSpec
) -> tuple[jax.Array, Normed]:
    """The same with a product of h. Where nothing lies between it and the norm, one kernel may make both: it
    adds what adapters add, or rounds what is multiplied in 8 bits."""
    others = around.post_norm, around.scale, spec.residual_scale
    if around.next_norm is None or any(one is not None for one in others):
        return added(x, linear(h, weight, bias), around, spec)
    norm = Norm(around.next_norm, spec.norm_eps, spec.norm_offset)
    both = weight.join(x, h, bias, norm, around.rounds)
    if both is None:
        return added(x, linear(h, weight, bias), around, spec)
    x, normed = both
    return x, rms_norm(x, around.next_norm, spec) if normed is None else normed


def is_plain(layer: Layer, w: LayerWeights, spec: ModelSpec) -> bool:
    """Whether `Projected` can say all that is done to its heads."""
    is_turned_whole = layer.rope is None or (
        2 * len(layer.rope.inv_freq) == spec.heads_of(layer).dim and not layer.rope.interleaved
    )
    is_normed_alone = w.q_norm is None or len(w.q_norm.shape) == 1
    others = layer.keys_as_values, layer.qk_norm, layer.query_temperature is not None, spec.value_norm
    return is_turned_whole and is_normed_alone and not any(others)


def heads_of(
    qkv: jax.Array, w: LayerWeights, spec: ModelSpec, layer: Layer, table: RopeTable | None, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, K, G+2, H] -> q [T, K, G, H], k [T, K, H], v [T, K, H], rotated and normed."""
    qk, v = qkv if layer.keys_as_values else qkv[:, :, :-1], qkv[:, :, -1]
    if spec.value_norm:
        v = normalize(v.astype(jnp.float32), spec.norm_eps).astype(qkv.dtype)
    if w.q_norm is not None and w.k_norm is not None:
        k = head_norm(qk[:, :, -1], w.k_norm, spec)
        qk = jnp.concatenate([head_norm(qk[:, :, :-1], w.q_norm, spec), k[:, :, None]], axis=2)
    if layer.rope is not None and table is not None:
        qk = rotate(qk, *table, layer.rope.interleaved)
    if layer.qk_norm:
        qk = normalize(qk.astype(jnp.float32), spec.norm_eps).astype(qkv.dtype)
    q, k = qk[:, :, :-1], qk[:, :, -1]
    if layer.query_temperature is not None:
        q = q * query_scales(layer.query_temperature, batch.positions)[:, None, None, None].astype(q.dtype)
    return q, k, v


def contained(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same keys and values [T, K, H] where these are finite. One that is not is told by its key instead:
    who sees it gets NaN, and nobody else does. As a value it would reach those too who give it no weight, for
    0 times infinity is NaN, while scores of keys that are not seen are thrown away."""
    finite = jnp.isfinite(v)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)


def query_scales(temperature: tuple[float, float, int], positions: jax.Array) -> jax.Array:
    floor, scale, offset = temperature
    return jnp.log1p(jnp.floor((positions + offset).astype(jnp.float32) / floor)) * scale + 1.0


def routed(
    x: jax.Array, normed: jax.Array, w: FeedForward, spec: ModelSpec, experts: Experts, kernels: ExpertKernels
) -> jax.Array:
    """[T, D], of tokens and as their norm leaves them: experts and their router may have other norms."""
    given = normed if w.norm is None else rms_norm(x, w.norm, spec)
    seen = given if w.router_norm is None else rms_norm(x, w.router_norm, spec)
    out = moe(given, seen, w, experts, ACTIVATIONS[spec.activation], kernels)
    out = optional_norm(out, w.post_norm, spec)
    if w.shared is None:
        return out
    shared = linear(gated(normed, w.shared, spec), w.shared.down, w.shared.down_bias)
    return out + optional_norm(shared, w.shared.post_norm, spec)


def gated(normed: Normed, w: FeedForward, spec: ModelSpec) -> Any:
    """[T, D] -> [T, F], as `down` takes it."""
    return w.gate_up.gated(normed, ACTIVATIONS[spec.activation], w.gate_up_bias)


def rms_norm(x: jax.Array, weight: jax.Array, spec: ModelSpec, fill: float = 1.0) -> jax.Array:
    scale = weight.astype(jnp.float32) + spec.norm_offset
    return (normalize(x.astype(jnp.float32), spec.norm_eps, weight.ndim, fill) * scale).astype(x.dtype)


def optional_norm(x: jax.Array, weight: jax.Array | None, spec: ModelSpec) -> jax.Array:
    return x if weight is None else rms_norm(x, weight, spec)


def head_norm(x: jax.Array, weight: jax.Array, spec: ModelSpec) -> jax.Array:
    """Of q [T, K, G, H] or k [T, K, H], over the axes that the weight has: each head, or all together, where
    query heads that only fill up are zeros and do not count."""
    fill = spec.num_heads / (spec.num_stored_heads or spec.num_heads) if weight.ndim == 3 else 1.0
    return rms_norm(x, weight, spec, fill)


def normalize(x: jax.Array, eps: float, num_axes: int = 1, fill: float = 1.0) -> jax.Array:
    mean = jnp.mean(x * x, axis=range(-num_axes, 0), keepdims=True) * fill
    return x * jax.lax.rsqrt(mean + eps)


def scaled(x: jax.Array, scale: float | None) -> jax.Array:
    return x if scale is None else x * jnp.asarray(scale, x.dtype)
