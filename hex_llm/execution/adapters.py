"""The slots of adapters on the devices: their arrays, and what of an adapter goes into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hex_llm.errors import ModelError
from hex_llm.execution.load import assembled
from hex_llm.models.adapters import SlotMatrices, Slots, adaptable, adapter_params, slot_params
from hex_llm.models.params import Param
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import placed, sharding
from hex_llm.weights.adapters import Adapter
from hex_llm.weights.checkpoint import text_name

HEADER_BYTES = 16 << 20  # of an adapter's file, and what else it may hold


@dataclass(frozen=True, eq=False)
class HostAdapter:
    """An adapter as one slot holds it; matrices that it does not train are left out."""

    digest: str
    matrices: dict[str, SlotMatrices]


@dataclass(frozen=True)
class AdapterLayout:
    """`spec`: as it is split over the devices."""

    spec: ModelSpec
    mesh: Mesh
    dtype: np.dtype[Any]
    num_slots: int
    max_rank: int
    slots_first: bool = False  # see AdapterKernels

    @cached_property
    def matrices(self) -> dict[str, Any]:
        return adaptable(self.spec)

    def params(self, num_slots: int) -> dict[str, SlotMatrices]:
        ranks, first = self.max_rank, self.slots_first
        return {path: slot_params(one, num_slots, ranks, first) for path, one in self.matrices.items()}

    @property
    def max_bytes(self) -> int:
        """Of an adapter's file: of float32, and with copies of the embedding and the head."""
        sizes = [
            sum(piece.shape) * self.max_rank for one in self.matrices.values() for piece in one.array.pieces
        ]
        return 4 * (sum(sizes) + 2 * self.spec.vocab_size * self.spec.hidden_size) + HEADER_BYTES

    def allocate(self) -> Slots:
        """All slots, empty."""
        return jax.tree.map(self._zeros, self.params(self.num_slots), is_leaf=_is_param)

    def on_host(self, adapter: Adapter) -> HostAdapter:
        """ModelError: it is not for this model."""
        places = {
            piece.name.removesuffix(".weight"): (path, piece.shape)
            for path, one in self.matrices.items()
            for piece in one.array.pieces
        }
        modules = {n if n in places else text_name(n): module for n, module in adapter.modules.items()}
        adapter = adapter._replace(modules=modules)
        for name, (down, up) in modules.items():
            _, shape = places.get(name, ("", "no module that can be adapted"))
            if (own := (len(up), down.shape[1])) != shape:
                raise ModelError(
                    f"{name!r:.120} is {own} in the adapter, but {shape} here; is it for another model, "
                    f"{adapter.base!r}?"
                )
        trained = {places[name][0] for name in modules}
        return HostAdapter(adapter.digest, {path: self._fused(path, adapter) for path in trained})

    def _fused(self, path: str, adapter: Adapter) -> SlotMatrices:
        matrix, modules = self.matrices[path], adapter.modules
        ranks = {name: len(one.down) for name, one in modules.items()}
        params = adapter_params(matrix, ranks, self.max_rank)
        down = assembled(params.down, lambda piece, cut: modules[piece.name].down[cut], self.dtype)
        up = assembled(params.up, lambda piece, cut: modules[piece.name].up[cut], self.dtype)
        # The ranks of fused modules lie side by side.
        return SlotMatrices(down.reshape(1, -1, *down.shape[2:]), up[..., None, :], params.fused)

    def stage(self, adapter: HostAdapter) -> Slots:
        """Onto the devices, to be written into a slot; waits until it is there."""

        def staged(path: str, params: SlotMatrices) -> SlotMatrices:
            own = adapter.matrices.get(path)
            if own is None:
                return SlotMatrices(self._zeros(params.down), self._zeros(params.up), params.fused)
            down = placed(own.down, self._lies(params.down))
            up = placed(own.up.reshape(params.up.shape), self._lies(params.up))
            return SlotMatrices(down, up, params.fused)

        return jax.block_until_ready({path: staged(path, one) for path, one in self.params(1).items()})

    def described(self) -> Slots:
        """What `stage` gives."""

        def describe(param: Param) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(param.shape, self.dtype, sharding=self._lies(param))

        return jax.tree.map(describe, self.params(1), is_leaf=_is_param)

    def _zeros(self, param: Param) -> jax.Array:
        return _zeros(param.shape, self.dtype, self._lies(param))()

    def _lies(self, param: Param) -> NamedSharding:
        return sharding(self.mesh, param.shape, param.axes)


def _is_param(node: Any) -> bool:
    return isinstance(node, Param)


@cache  # one compilation for all layers
def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any], placed: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=placed)
