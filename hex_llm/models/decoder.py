"""The one forward pass of every model family: embed, blocks, logits.

It knows shapes and values only: not how weights were loaded or sharded, nor how a batch came about.
An absent weight (None) is an absent operation. Letters of shapes: see kernels/attention.py.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from hex_llm.kernels.attention import AttentionKernels, Batch, KVPages, Options, Projected
from hex_llm.kernels.experts import Activation, ExpertKernels
from hex_llm.models.linear import Matrix, linear
from hex_llm.models.moe import moe
from hex_llm.models.params import FeedForward, LayerWeights, Weights
from hex_llm.models.rope import rope_table, rotate
from hex_llm.models.spec import Layer, ModelSpec, Rope

RopeTable = tuple[jax.Array, jax.Array]

ACTIVATIONS: dict[str, Activation] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
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
) -> tuple[jax.Array, list[KVPages]]:
    """Embeddings [T, D] -> hidden states [T, D] before the head, and the KV pages of every layer.

    `rope_lengths` [T]: the length that each token's rope frequencies are made for (rope.rope_table).
    """
    ropes = {layer.rope for layer in spec.layers if layer.rope}
    tables: dict[Rope | None, RopeTable] = {r: rope_table(r, batch.positions, rope_lengths) for r in ropes}
    new_pages = []
    for layer, w, layer_pages in zip(spec.layers, weights.layers, pages, strict=True):
        x, layer_pages = block(
            x, w, spec, layer, tables.get(layer.rope), layer_pages, batch, attention_kernels, expert_kernels
        )
        new_pages.append(layer_pages)
    return rms_norm(x, weights.norm, spec), new_pages


def logits(spec: ModelSpec, lm_head: Matrix, hidden: jax.Array) -> jax.Array:
    """hidden [R, D] -> float32 [R, V]."""
    out = scaled(linear(hidden, lm_head).astype(jnp.float32), spec.logit_scale)
    if spec.logit_softcap is not None:
        out = jnp.tanh(out / spec.logit_softcap) * spec.logit_softcap
    return out


# Compiled inside the step, so that layers that are alike are traced and lowered once, not once each.
@partial(jax.jit, static_argnames=("spec", "layer", "attention_kernels", "expert_kernels"))
def block(
    x: jax.Array,
    w: LayerWeights,
    spec: ModelSpec,
    layer: Layer,
    table: RopeTable | None,
    pages: KVPages,
    batch: Batch,
    attention_kernels: AttentionKernels,
    expert_kernels: ExpertKernels,
) -> tuple[jax.Array, KVPages]:
    """One decoder layer: tokens [T, D] in; tokens [T, D] and the layer's KV pages out."""
    qkv = linear(optional_norm(x, w.attn_norm, spec), w.qkv, w.qkv_bias)  # [T, K, G+2, H]
    options = Options(layer.mask, spec.attention_scale, spec.attn_softcap, w.sinks)
    attend, attend_projected = attention_kernels
    if attend_projected and is_plain(layer, w, spec):
        norms = None if w.q_norm is None or w.k_norm is None else (w.q_norm, w.k_norm)
        heads = Projected(qkv, norms, table, spec.norm_eps, spec.norm_offset)
        out, pages = attend_projected(heads, pages, batch, options)
    else:
        q, k, v = heads_of(qkv, w, spec, layer, table, batch)
        out, pages = attend(q, *contained(k, v), pages, batch, options)
    h = optional_norm(linear(out, w.out, w.out_bias), w.attn_post_norm, spec)
    x = x + scaled(h, spec.residual_scale)
    h = feed_forward(x, w, spec, layer, expert_kernels)
    x = x + scaled(optional_norm(h, w.ffn_post_norm, spec), spec.residual_scale)
    return x if w.scale is None else x * w.scale, pages


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


def feed_forward(
    x: jax.Array, w: LayerWeights, spec: ModelSpec, layer: Layer, expert_kernels: ExpertKernels
) -> jax.Array:
    """[T, D], which is normed here: routed experts and their router may have norms of their own."""
    activation, ffn, normed = ACTIVATIONS[spec.activation], w.ffn, optional_norm(x, w.ffn_norm, spec)
    if layer.experts is None:
        return gated_mlp(normed, ffn, activation)
    routed = normed if ffn.norm is None else rms_norm(x, ffn.norm, spec)
    seen = routed if ffn.router_norm is None else rms_norm(x, ffn.router_norm, spec)
    out = moe(routed, seen, ffn, layer.experts, activation, expert_kernels)
    out = optional_norm(out, ffn.post_norm, spec)
    if ffn.shared is None:
        return out
    return out + optional_norm(gated_mlp(normed, ffn.shared, activation), ffn.shared.post_norm, spec)


def gated_mlp(x: jax.Array, w: FeedForward, activation: Activation) -> jax.Array:
    return linear(w.gate_up.gated(x, activation, w.gate_up_bias), w.down, w.down_bias)


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
