"""Every parameter of a model, declared once: its shape, its logical axes and where it lies in a checkpoint.

Initialisation, sharding and loading all walk this tree; `parallel.shardings` maps the axes to devices.
In a fused matrix the axis that is split over devices leads the axis that it was fused along:
qkv is [K, G+2, H, D] (a KV head with its queries), gate_up is [F, 2, D].

An example, which a test follows: K = 2 KV heads of G = 2 queries each, H = 4, D = 16, on two devices.

>>> qkv = Param(
...     (2, 4, 4, 16),
...     ("kv_heads", None, None, None),
...     (
...         Piece("q_proj", (16, 16), view=(2, 2, 4, 16), to=(slice(None), slice(0, 2))),
...         Piece("k_proj", (8, 16), view=(2, 4, 16), to=(slice(None), 2)),
...         Piece("v_proj", (8, 16), view=(2, 4, 16), to=(slice(None), 3)),
...     ),
... )

The rows of q_proj [K*G*H, D] are seen as [K, G, H, D] and become qkv[:, 0:2]; those of k_proj [K*H, D], as
[K, H, D], become qkv[:, 2]. The second device holds qkv[1:2], for which execution/load.py reads one stretch
of each tensor: q_proj[8:16], k_proj[4:8] and v_proj[4:8].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from hex_llm.models.linear import Dense, Matrix
from hex_llm.models.spec import CheckpointNames, Experts, Heads, Layer, ModelSpec

Leaf = Any  # a Param in the abstract tree, a jax.Array in the loaded one
Index = tuple[slice | int, ...]
F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Piece:
    """A stretch of a checkpoint tensor that becomes a part of a parameter."""

    name: str
    shape: tuple[int, ...]  # of the whole checkpoint tensor
    view: tuple[int, ...]  # the stretch's shape: checkpoint axes split further, never merged
    to: Index = ()  # where it goes: leading indices of the parameter
    start: tuple[int, int] = (0, 0)  # (axis, offset) of the stretch in the checkpoint tensor
    order: tuple[int, ...] | None = None  # permutation of the view's axes that gives the parameter's
    repeat: int = 1  # each entry of the first axis is taken this many times


class Rounding(NamedTuple):
    bits: int
    group: int  # inputs that share a scale; 0: all of an output do
    to_float: bool = False


@dataclass(frozen=True)
class Param:
    """What no piece reaches is zeros."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # logical: "vocab", "kv_heads", "ffn", "experts" or None
    pieces: tuple[Piece, ...]
    dtype: np.dtype[Any] | None = None  # None: the model's; integers must be stored as they are declared
    norm: bool = False  # starts at one (less the family's offset) instead of random
    rounded_to: Rounding | None = None  # quantized so once it is loaded
    packed: bool = False  # of whole numbers of 4 bits: two share a byte once they are loaded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FeedForward:
    """Of routed experts, `gate_up` and `down` are given to a kernel (kernels/experts.py), and biases are
    [E, 2, F] and [E, D]."""

    gate_up: Any  # Matrix [F, 2, D], or [E, 2, F, D]
    down: Any  # Matrix [D, F], or [E, D, F]
    gate_up_bias: Leaf | None = None
    down_bias: Leaf | None = None
    router: Leaf = None  # [E, D]
    router_bias: Leaf | None = None  # [E]
    router_norm: Leaf | None = None  # [D]
    correction: Leaf | None = None  # [E]
    expert_scales: Leaf | None = None  # [E]
    norm: Leaf | None = None  # [D], of routed experts alone
    post_norm: Leaf | None = None  # [D]
    shared: FeedForward | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeights:
    attn_norm: Leaf | None  # [D]
    qkv: Matrix  # [K, G+2, H, D]; or [K, G+1, H, D], whose keys are values too
    qkv_bias: Leaf | None  # [K, G+2, H]
    q_norm: Leaf | None  # [H]; or [K, G, H], of all heads together
    k_norm: Leaf | None  # [H]; or [K, H]
    sinks: Leaf | None  # [K, G]
    out: Matrix  # [D, K, G, H]
    out_bias: Leaf | None
    attn_post_norm: Leaf | None
    ffn_norm: Leaf | None
    ffn: FeedForward
    ffn_post_norm: Leaf | None
    scale: Leaf | None  # [1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    embed: Matrix  # [V, D]
    layers: list[LayerWeights]
    norm: Leaf
    head: Matrix | None  # None: tied to embed

    @property
    def lm_head(self) -> Matrix:
        """What gives the logits."""
        return self.embed if self.head is None else self.head


def abstract_weights(spec: ModelSpec) -> Weights:
    names, width = spec.names, spec.hidden_size
    table = (spec.vocab_size, width)
    head = None if spec.tied else Dense(_whole(names.head, table, ("vocab", None)))
    return Weights(
        embed=Dense(_whole(names.prefix + "embed_tokens.weight", table, ("vocab", None))),
        layers=[_layer(spec, layer, f"{names.prefix}layers.{i}.") for i, layer in enumerate(spec.layers)],
        norm=_norm(names.prefix + "norm", width),
        head=head,
    )


def declared(weights: Weights) -> list[Param]:
    """The parameters in the tree's order."""
    return jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, Param))


def _whole(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...] | None = None) -> Param:
    return Param(shape, axes or (None,) * len(shape), (Piece(name, shape, shape),))


def _norm(name: str, width: int) -> Param:
    return Param((width,), (None,), (Piece(name + ".weight", (width,), (width,)),), norm=True)


def _optional_norm(prefix: str, name: str | None, width: int) -> Param | None:
    return None if name is None else _norm(prefix + name, width)


def _layer(spec: ModelSpec, layer: Layer, prefix: str) -> LayerWeights:
    norms, width, heads = spec.names.norms, spec.hidden_size, spec.heads_of(layer)
    q_norm, k_norm = _head_norms(spec, heads, prefix + "self_attn.")
    optional_norm = partial(_optional_norm, prefix, width=width)

    return LayerWeights(
        attn_norm=optional_norm(norms.attn),
        qkv=Dense(_qkv(spec, layer, prefix + "self_attn.", "weight", (width,)), num_outputs=3),
        qkv_bias=_qkv(spec, layer, prefix + "self_attn.", "bias", ()) if spec.qkv_bias else None,
        q_norm=q_norm,
        k_norm=k_norm,
        sinks=_of_queries(heads, prefix + "self_attn.sinks", ()) if spec.sinks else None,
        out=Dense(_out(heads, width, prefix + "self_attn.o_proj.weight")),
        out_bias=_whole(prefix + "self_attn.o_proj.bias", (width,), (None,)) if spec.out_bias else None,
        attn_post_norm=optional_norm(norms.attn_post),
        ffn_norm=optional_norm(norms.ffn),
        ffn=_feed_forward(spec, layer, prefix),
        ffn_post_norm=optional_norm(norms.ffn_post),
        scale=_ones(prefix, spec.names.layer_scale, 1),
    )


def _ones(prefix: str, name: str | None, width: int) -> Param | None:
    """What multiplies; None: nothing does."""
    return None if name is None else replace(_whole(prefix + name, (width,)), norm=True)


def _head_norms(spec: ModelSpec, heads: Heads, prefix: str) -> tuple[Param | None, Param | None]:
    q_name, k_name = prefix + "q_norm", prefix + "k_norm"
    if spec.head_norm is None:
        return None, None
    if spec.head_norm == "each":
        return _norm(q_name, heads.dim), _norm(k_name, heads.dim)
    stored, head = heads.num_kv // heads.kv_repeat, heads.dim
    k = Piece(k_name + ".weight", (stored * head,), (stored, head), repeat=heads.kv_repeat)
    k_norm = Param((heads.num_kv, head), ("kv_heads", None), (k,), norm=True)
    return replace(_of_queries(heads, q_name + ".weight", (head,)), norm=True), k_norm


def _of_queries(heads: Heads, name: str, head: tuple[int, ...]) -> Param:
    """[K, G, *head] of what lies there for one query head after another, in a row."""
    size = math.prod(head)
    stored = ((heads.num_stored or heads.num) * size,)
    pieces = tuple(
        Piece(name, stored, (num, *head), (i, slice(0, num)), (0, first * size))
        for i, first, num in _divided_queries(heads)
    )
    shape = (heads.num_kv, heads.group_size, *head)
    return Param(shape, ("kv_heads", *(None,) * (len(shape) - 1)), pieces or (Piece(name, stored, shape),))


def _out(heads: Heads, width: int, name: str) -> Param:
    head = heads.dim
    stored = (width, (heads.num_stored or heads.num) * head)
    pieces = tuple(
        Piece(name, stored, (width, num, head), (slice(None), i, slice(0, num)), (1, first * head))
        for i, first, num in _divided_queries(heads)
    )
    shape = (width, heads.num_kv, heads.group_size, head)
    return Param(shape, (None, "kv_heads", None, None), pieces or (Piece(name, stored, shape),))


def _divided_queries(heads: Heads) -> Iterator[tuple[int, int, int]]:
    """Of each KV head as it is held: its place, its first query head in the checkpoint, and how many those
    are; nothing where all have as many."""
    if heads.num_stored is None:
        return
    of_stored = heads.num_stored * heads.kv_repeat // heads.num_kv
    for i in range(heads.num_kv):
        head, part = divmod(i, heads.kv_repeat)
        first = min(part * heads.group_size, of_stored)
        if num := min(of_stored - first, heads.group_size):
            yield i, head * of_stored + first, num


def _qkv(spec: ModelSpec, layer: Layer, prefix: str, kind: str, width: tuple[int, ...]) -> Param:
    """The weight (width = (D,)) or the bias (width = ()) of the fused q, k and v projection."""
    heads = spec.heads_of(layer)
    kv_heads, group, head, repeat = heads.num_kv, heads.group_size, heads.dim, heads.kv_repeat
    stored = kv_heads // repeat
    q_rows, kv_rows = (heads.num_stored or heads.num) * head, stored * head
    fused = q_rows + 2 * kv_rows
    start = dict(zip("qkv", (0, q_rows, q_rows + kv_rows), strict=True))

    def piece(
        which: str, rows: int, view: tuple[int, ...], to: Index, *, first: int = 0, repeat: int = 1
    ) -> Piece:
        name = f"{prefix}{'qkv' if spec.names.fused else which}_proj.{kind}"
        shape = (fused if spec.names.fused else rows, *width)
        offset = (0, first + (start[which] if spec.names.fused else 0))
        return Piece(name, shape, (*view, *width), to, offset, repeat=repeat)

    every = slice(None)
    queries = tuple(
        piece("q", q_rows, (num, head), (i, slice(0, num)), first=first * head)
        for i, first, num in _divided_queries(heads)
    )
    names = "k" if layer.keys_as_values else "kv"
    pieces = (
        *(queries or (piece("q", q_rows, (kv_heads, group, head), (every, slice(0, group))),)),
        *(
            piece(which, kv_rows, (stored, head), (every, group + i), repeat=repeat)
            for i, which in enumerate(names)
        ),
    )
    shape = (kv_heads, group + len(names), head, *width)
    return Param(shape, ("kv_heads", *(None,) * (len(shape) - 1)), pieces)


def _feed_forward(spec: ModelSpec, layer: Layer, layer_prefix: str) -> FeedForward:
    experts, prefix = layer.experts, layer_prefix + spec.names.ffn
    if experts is None:
        return _dense(spec, prefix, layer.ffn_size)
    names, width, num, size = spec.names, spec.hidden_size, experts.num, experts.size
    pieces = _stacked if names.stacked_experts else _apart
    gate_up, down = pieces(names, prefix + "experts", num, size, width)
    return FeedForward(
        gate_up=Dense(Param((num, 2, size, width), ("experts", None, "ffn", None), gate_up), num_outputs=3),
        down=Dense(Param((num, width, size), ("experts", None, "ffn"), down), num_outputs=2),
        gate_up_bias=Param((num, 2, size), (None, None, "ffn"), _biases(names, prefix + "experts", num, size))
        if experts.bias
        else None,
        down_bias=_whole(prefix + "experts.down_proj_bias", (num, width)) if experts.bias else None,
        router=_whole(f"{prefix}{names.router}.weight", (num, width)),
        router_bias=_whole(f"{prefix}{names.router}.bias", (num,)) if experts.bias else None,
        # As exact as it is stored, for it tells experts apart that are nearly alike.
        correction=replace(_whole(prefix + names.correction, (num,)), dtype=F32)
        if experts.corrected
        else None,
        router_norm=_ones(prefix, names.router_norm, width),
        expert_scales=_ones(prefix, names.expert_scales, num),
        norm=_optional_norm(layer_prefix, names.norms.routed, width),
        post_norm=_optional_norm(layer_prefix, names.norms.routed_post, width),
        shared=_shared_expert(spec, experts, prefix, layer_prefix),
    )


def _shared_expert(spec: ModelSpec, experts: Experts, prefix: str, layer_prefix: str) -> FeedForward | None:
    if experts.shared_size is None:
        return None
    shared = _dense(spec, f"{prefix}{spec.names.shared_expert}.", experts.shared_size)
    return replace(
        shared, post_norm=_optional_norm(layer_prefix, spec.names.norms.shared_post, spec.hidden_size)
    )


Pieces = tuple[Piece, ...]


def _apart(names: CheckpointNames, prefix: str, num: int, size: int, width: int) -> tuple[Pieces, Pieces]:
    """Gates with ups, and downs, of experts in tensors of their own."""

    def piece(expert: int, part: int, shape: tuple[int, int], *to: int) -> Piece:
        return Piece(f"{prefix}.{expert}.{names.expert[part]}.weight", shape, shape, (expert, *to))

    if names.interleaved:
        names_of = [f"{prefix}.{e}.gate_up_proj.weight" for e in range(num)]
        shape, view, order = (2 * size, width), (size, 2, width), (1, 0, 2)
        gate_up = tuple(Piece(name, shape, view, (e,), order=order) for e, name in enumerate(names_of))
    else:
        gate_up = tuple(piece(e, half, (size, width), half) for e in range(num) for half in (0, 1))
    return gate_up, tuple(piece(e, 2, (width, size)) for e in range(num))


def _stacked(names: CheckpointNames, prefix: str, num: int, size: int, width: int) -> tuple[Pieces, Pieces]:
    """The same of experts in one tensor."""
    if names.stacked_experts == "outputs":
        both, half, stored = (num, 2 * size, width), (num, size, width), (num, width, size)
        gate_up = tuple(
            Piece(prefix + ".gate_up_proj", both, half, (slice(None), i), (1, i * size)) for i in (0, 1)
        )
        return gate_up, (Piece(prefix + ".down_proj", stored, stored),)
    shape, half_shape, order = (num, width, 2 * size), (num, width, size), (0, 2, 1)
    gate_up = tuple(
        Piece(prefix + ".gate_up_proj", shape, half_shape, (slice(None), half), (2, half * size), order)
        for half in (0, 1)
    )
    if names.interleaved:
        gate_up = (Piece(prefix + ".gate_up_proj", shape, (num, width, size, 2), order=(0, 3, 2, 1)),)
    stored = (num, size, width)
    return gate_up, (Piece(prefix + ".down_proj", stored, stored, order=order),)


def _biases(names: CheckpointNames, prefix: str, num: int, size: int) -> Pieces:
    """Of gates and ups of all experts."""
    if names.interleaved:
        return (Piece(prefix + ".gate_up_proj_bias", (num, 2 * size), (num, size, 2), order=(0, 2, 1)),)
    return tuple(
        Piece(f"{prefix}.{name}_bias", (num, size), (num, size), (slice(None), half))
        for half, name in enumerate(names.expert[:2])
    )


def _dense(spec: ModelSpec, prefix: str, size: int) -> FeedForward:
    width, bias = spec.hidden_size, spec.ffn_bias
    return FeedForward(
        gate_up=Dense(_gate_up(spec, prefix, "weight", size, (width,)), num_outputs=2),
        down=Dense(_whole(prefix + "down_proj.weight", (width, size), (None, "ffn"))),
        gate_up_bias=_gate_up(spec, prefix, "bias", size, ()) if bias else None,
        down_bias=_whole(prefix + "down_proj.bias", (width,), (None,)) if bias else None,
    )


def _gate_up(spec: ModelSpec, prefix: str, kind: str, size: int, width: tuple[int, ...]) -> Param:
    fused = spec.names.fused
    shape = ((2 if fused else 1) * size, *width)

    def piece(half: int, name: str) -> Piece:
        name = f"{prefix}{'gate_up' if fused else name}_proj.{kind}"
        return Piece(name, shape, (size, *width), (slice(None), half), (0, half * size if fused else 0))

    pieces = (piece(0, "gate"), piece(1, "up"))
    return Param((size, 2, *width), ("ffn", None, *(None,) * len(width)), pieces)
