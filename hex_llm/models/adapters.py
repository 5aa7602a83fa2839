"""Adapters (LoRA) of a step's rows: a matrix around another, which adds to each row what its own one says.

Adapters lie in slots. An adapter adds up @ down to a matrix; where several modules of a checkpoint are fused
into one matrix, each has ranks of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels.adapters import AdapterKernels, Fused, Norm, Owners, Ranked
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.matrix import Begun, PlainMatrix
from hex_llm.models.linear import Dense, linear, merged
from hex_llm.models.params import FeedForward, Param, Piece, Weights, abstract_weights
from hex_llm.models.spec import ModelSpec

HEAD = ".head"  # the path of the head


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotMatrices:
    """What all slots add to a matrix [*outputs, *inputs]."""

    down: Any  # [slots, modules * ranks, *inputs]
    up: Any  # [*outputs, slots, ranks], those of an output's own module; or, for some kernels, slots first
    fused: Fused = field(default=Fused(), metadata={"static": True})


Slots = dict[str, SlotMatrices]  # by the path of their matrix in the tree of weights


def add_by_all(
    out: jax.Array,
    x: jax.Array,
    down: jax.Array,
    up: jax.Array,
    fused: Fused,
    owners: Owners,
    activation: Activation | None = None,
    following: jax.Array | None = None,
) -> jax.Array:
    """See kernels.adapters.AddAdapters. Rows ask all slots at once and keep the answer of their own one:
    others add exact zeros, for everything in a slot is finite."""
    ranks = Dense(down, num_outputs=2).matmul(x)
    ranks = ranks.reshape(*ranks.shape[:2], fused.num_modules, -1)

    def added(module: int) -> jax.Array:
        begin, end = fused.range_of(module, up.shape[fused.axis])
        own = _of_own_slot(ranks[:, :, module], owners.which)
        rows = jax.lax.slice_in_dim(up, begin, end, axis=fused.axis)
        return Dense(rows, num_outputs=out.ndim - 1).matmul(own)

    out = out + jnp.concatenate([added(i) for i in range(fused.num_modules)], axis=1 + fused.axis)
    return out if activation is None else activation(out[..., 0]) * out[..., 1]


def _of_own_slot(ranks: jax.Array, which: jax.Array) -> jax.Array:
    """[T, slots, ranks] -> [T, slots * ranks], zeros in other slots."""
    own = which[:, None] == jnp.arange(1, ranks.shape[1] + 1)
    return jnp.where(own[..., None], ranks, 0).reshape(len(ranks), -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted(PlainMatrix):
    """A Matrix."""

    base: Any
    slots: SlotMatrices
    owners: Owners
    kernels: AdapterKernels = field(default=AdapterKernels(add_by_all), metadata={"static": True})
    following: Any = None  # the first factors of the matrix that multiplies what `gated` makes

    def matmul(self, x: jax.Array | Ranked) -> jax.Array:
        return self._added(x)

    def gated(self, x: jax.Array, activation: Activation, bias: jax.Array | None = None) -> Any:
        return self._added(x, activation, bias)

    def rows(self, which: jax.Array) -> jax.Array:
        up, slots_first = self.slots.up, self.kernels.slots_first
        ranks = _of_own_slot(up[:, which].swapaxes(0, 1) if slots_first else up[which], self.owners.which)
        down = self.slots.down.reshape(ranks.shape[1], -1)
        return self.base.rows(which) + jnp.dot(ranks, down, preferred_element_type=jnp.float32)

    def begin(self, x: jax.Array, bias: jax.Array | None) -> Begun | None:
        slots, begin = self.slots, self.kernels.begin
        if begin is None:
            return None
        pending = begin(x, slots.down, slots.up, slots.fused, self.owners)
        return Begun(linear(x, self.base, bias), pending)

    def join(
        self, around: jax.Array, x: jax.Array | Ranked, bias: jax.Array | None, norm: Norm, rounds: bool
    ) -> tuple[jax.Array, jax.Array | None] | None:
        if self.kernels.join is None:
            return None
        x, slots = merged(x), self.slots
        out = linear(_unranked(x), self.base, bias)
        return self.kernels.join(around, out, x, slots.down, slots.up, self.owners, norm)

    def _added(self, x: Any, activation: Activation | None = None, bias: jax.Array | None = None) -> Any:
        slots, out = self.slots, linear(_unranked(x), self.base, bias)
        given = out, x, slots.down, slots.up, slots.fused, self.owners
        return self.kernels.add(*given, activation, self.following)


def _unranked(x: jax.Array | Ranked) -> jax.Array:
    return x.x if isinstance(x, Ranked) else x


def adapt(weights: Weights, slots: Slots, which: jax.Array, kernels: AdapterKernels) -> Weights:
    """`which` [T]: the slots of a step's tokens."""
    num_slots = next(len(one.down) for one in slots.values())
    owners = Owners(which, kernels.tiles and kernels.tiles(which, num_slots))

    def wrap(path: Any, node: Any) -> Any:
        name = jax.tree_util.keystr(path)
        own, behind = slots.get(name), slots.get(name.replace(".gate_up", ".down"))
        following = behind.down if name.endswith(".gate_up") and behind is not None else None
        if own is None:
            return node
        # What ranks are made beside was measured with the products of cuBLAS.
        base = replace(node, has_kernel=False) if isinstance(node, Dense) else node
        return Adapted(base, own, owners, kernels, following)

    # An adapter of the head is none of the embedding that it may be tied to.
    separate = replace(weights, head=weights.lm_head)
    adapted: Weights = jax.tree_util.tree_map_with_path(
        wrap, separate, is_leaf=lambda node: hasattr(node, "matmul")
    )
    return adapted


# ---- where an adapter's modules go


def adaptable(spec: ModelSpec) -> dict[str, Dense]:
    """The declared matrices that adapters can add to, by their paths: all but those of routed experts."""

    def is_routed(node: Any) -> bool:
        return isinstance(node, FeedForward) and node.router is not None

    def without_experts(node: Any) -> Any:
        return replace(node, gate_up=None, down=None) if is_routed(node) else node

    weights = abstract_weights(replace(spec, tied=False))  # the head has a name of its own even then
    weights = jax.tree.map(without_experts, weights, is_leaf=lambda n: is_routed(n) or isinstance(n, Dense))
    found = jax.tree_util.tree_flatten_with_path(weights, is_leaf=lambda node: isinstance(node, Dense))[0]
    return {jax.tree_util.keystr(path): node for path, node in found if isinstance(node, Dense)}


def module_names(matrix: Dense) -> list[str]:
    """Those of a checkpoint that are fused into it."""
    return list(dict.fromkeys(piece.name.removesuffix(".weight") for piece in matrix.array.pieces))


def slot_params(matrix: Dense, num_slots: int, max_rank: int, slots_first: bool) -> SlotMatrices:
    """Of Params, which are divided over devices as the matrix is."""
    param, num, fused = matrix.array, matrix.num_outputs, fused_modules(matrix)
    down = Param(
        (num_slots, fused.num_modules * max_rank, *param.shape[num:]), (None, None, *param.axes[num:]), ()
    )
    if slots_first:
        up = Param((num_slots, *param.shape[:num], max_rank), (None, *param.axes[:num], None), ())
    else:
        up = Param((*param.shape[:num], num_slots, max_rank), (*param.axes[:num], None, None), ())
    return SlotMatrices(down, up, fused)


def fused_modules(matrix: Dense) -> Fused:
    """How its modules share the outputs: one after another along one axis."""
    names, shape = module_names(matrix), matrix.array.shape[: matrix.num_outputs]
    owners = np.zeros(shape, int)
    for piece in matrix.array.pieces:
        owners[piece.to[: matrix.num_outputs]] = names.index(piece.name.removesuffix(".weight"))
    for axis, size in enumerate(shape):
        along = np.moveaxis(owners, axis, 0).reshape(size, -1)
        if (along == along[:, :1]).all() and (np.diff(along[:, 0]) >= 0).all():
            return Fused(axis, tuple(np.searchsorted(along[:, 0], range(1, len(names))).tolist()))
    raise AssertionError(f"the modules of {names} lie among each other")


def adapter_params(matrix: Dense, ranks: Mapping[str, int], max_rank: int) -> SlotMatrices:
    """Of Params [modules, rank, *inputs] and [*outputs, rank], made of one adapter's tensors, whose modules
    have these ranks. Their pieces are named as the matrix's, for each of the two."""
    param, names, num = matrix.array, module_names(matrix), matrix.num_outputs
    downs: list[Piece] = []
    ups: list[Piece] = []
    for piece in param.pieces:
        module = piece.name.removesuffix(".weight")
        if (rank := ranks.get(module)) is None:
            continue
        own = (names.index(module), slice(0, rank))
        to = (*piece.to, *(slice(None),) * (len(param.shape) - len(piece.to)))
        num_out = sum(isinstance(at, slice) for at in to[:num])  # axes of the piece that are outputs
        (outputs, inputs), (axis, offset) = piece.shape, piece.start
        view, start = (rank, *piece.view[num_out:]), (1, offset * (axis == 1))
        downs.append(Piece(module, (rank, inputs), view, (*own, *to[num:]), start))
        view, start = (*piece.view[:num_out], rank), (0, offset * (axis == 0))
        ups.append(Piece(module, (outputs, rank), view, (*to[:num], own[1]), start, repeat=piece.repeat))
    shape, ranked = param.shape, (len(names), max_rank)
    return SlotMatrices(
        Param((*ranked, *shape[num:]), (None,) * (2 + len(shape) - num), tuple(downs)),
        Param((*shape[:num], max_rank), (None,) * (1 + num), tuple(ups)),
        fused_modules(matrix),
    )
