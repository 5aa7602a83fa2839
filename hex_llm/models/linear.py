"""The one place where activations meet weights.

A matrix is a leaf of a model's tree of weights that multiplies itself, in whatever form it is held: `Dense`
here, `Quantized` in quantized.py, panels in kernels/cpu.py. It is a pytree of its own, of one or several
arrays. What a form must know of a step's rows is one more of its arrays, put there before the forward pass by
a map over the tree's matrices, so that the decoder knows no form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hex_llm.kernels import gpu_dense
from hex_llm.kernels.adapters import Norm
from hex_llm.kernels.experts import Activation
from hex_llm.kernels.matrix import Begun, PlainMatrix

FEW_ROWS = range(2, 65)


class Matrix(Protocol):
    """[*outputs, *inputs]"""

    def matmul(self, x: Any) -> jax.Array:
        """x [T, inputs], their axes merged -> [T, *outputs]; or what `gated` made of it."""

    def gated(self, x: Any, activation: Activation, bias: jax.Array | None = None) -> Any:
        """Of gates and ups [F, 2, D]: x [T, D] -> [T, F], the activation of the gates times the ups; or
        float8.Rounded, if it was laid out for a matrix that multiplies that, or adapters.Ranked. x too may
        come rounded to one that is multiplied so."""

    def rows(self, which: jax.Array) -> jax.Array:
        """Of one axis of outputs: [T] -> [T, *inputs]."""

    @property
    def takes_rounded(self) -> bool:
        """It multiplies activations of 8 bits: who makes them for it alone had better round them."""

    def begin(self, x: Any, bias: jax.Array | None) -> Begun | None:
        """A product, left to be ended by the kernel that makes heads of it; None: `matmul` ends it."""

    def join(
        self, around: jax.Array, x: Any, bias: jax.Array | None, norm: Norm, rounds: bool
    ) -> tuple[jax.Array, Any] | None:
        """`around` and the product [T, D], and that normed, if it was made on the way, and rounded, if who
        reads it wants it so (`rounds`); None: there is no kernel for these."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(PlainMatrix):
    """A Matrix that lies as in the checkpoint, outputs first, and is multiplied by XLA."""

    array: Any  # a jax.Array; in the tree of declarations a Param
    num_outputs: int = field(default=1, metadata={"static": True})  # axes
    # For some rows, on a GPU that is alone:
    has_kernel: bool = field(default=False, metadata={"static": True})
    fuses_gates: bool = field(default=False, metadata={"static": True})  # the kernel may, of gates and ups

    def matmul(self, x: jax.Array) -> jax.Array:
        """Axes are merged: XLA's CPU backend runs a product of matrices several times faster than one of
        tensors. An axis that is split over devices leads its group, so merging moves nothing between them."""
        matrix = self._merged(x)
        if self._is_few(x) and gpu_dense.num_splits(len(matrix)) == 1:
            return gpu_dense.product(x, matrix, x.dtype).reshape(len(x), *self._outputs)
        return _any_product(x, matrix).reshape(len(x), *self._outputs)

    def join(
        self, around: jax.Array, x: jax.Array, bias: jax.Array | None, norm: Norm, rounds: bool
    ) -> tuple[jax.Array, jax.Array] | None:
        if bias is not None:
            return None
        x = merged(x)
        if self._is_few(x):
            parts = gpu_dense.product(x, self._merged(x), x.dtype)
        elif self.has_kernel and gpu_dense.can_join_row(x):
            parts = _row_product(x, self._merged(x))[None]
        else:
            return None
        return gpu_dense.join(around, parts, norm)

    def gated(self, x: jax.Array, activation: Activation, bias: jax.Array | None = None) -> jax.Array:
        def rows_first(weight: Dense, x: jax.Array, bias: jax.Array | None) -> jax.Array:
            return PlainMatrix.gated(weight, x, activation, bias)

        def rows_last(weight: Dense, x: jax.Array, bias: jax.Array | None) -> jax.Array:
            """Gates and ups then lie in long stretches, which CPUs can read as vectors."""
            both = _weight_first(x, weight._merged(x)).T.astype(x.dtype)
            both = both.reshape(*weight._outputs, len(x))  # [F, 2, T]
            both = both if bias is None else both + bias[..., None]
            return (activation(both[:, 0]) * both[:, 1]).T

        if self.fuses_gates and bias is None and gpu_dense.can_gate(x, self.array):
            return gpu_dense.gated(x, self.array, activation)
        return jax.lax.platform_dependent(self, x, bias, cpu=rows_last, default=rows_first)

    def rows(self, which: jax.Array) -> jax.Array:
        return self.array[which]

    def expanded(self, dtype: DTypeLike) -> Dense:
        """As floats, which it is made of already."""
        return self

    @property
    def _outputs(self) -> tuple[int, ...]:
        return self.array.shape[: self.num_outputs]

    def _is_few(self, x: jax.Array) -> bool:
        return self.has_kernel and gpu_dense.can_multiply(x, self._merged(x))

    def _merged(self, x: jax.Array) -> jax.Array:
        return self.array.reshape(-1, x.shape[1])


def linear(x: Any, weight: Matrix, bias: jax.Array | None = None) -> jax.Array:
    """x [T, *inputs] times weight [*outputs, *inputs] -> [T, *outputs]."""
    out = weight.matmul(merged(x))
    return out if bias is None else out + bias


def merged(x: Any) -> Any:
    """The axes of inputs; what one matrix made for another has them so."""
    return x.reshape(len(x), -1) if isinstance(x, jax.Array) else x


def _any_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """In x's type, summed in float32."""
    if x.dtype != jnp.float32:
        on_gpus = _row_product if len(x) == 1 else _narrow_product
        return jax.lax.platform_dependent(
            x, matrix, cpu=_rounded_product, cuda=on_gpus, default=_narrow_product
        )
    if len(x) in FEW_ROWS:
        return jax.lax.platform_dependent(x, matrix, cpu=_weight_first, default=_product)
    return _product(x, matrix)


def _product(x: jax.Array, matrix: jax.Array, out: DTypeLike = jnp.float32) -> jax.Array:
    return jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=out)


def _rounded_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return _product(x, matrix).astype(x.dtype)


def _narrow_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Accelerators sum in float32 whatever comes out; asked for float32, GPUs write it to memory first."""
    return _product(x, matrix, x.dtype)


def _row_product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """One row. Not called a product, it is one reduction, which reads faster (docs/kernels.md)."""
    return jnp.sum(x.astype(jnp.float32) * matrix.astype(jnp.float32), axis=1).astype(x.dtype)[None]


def _weight_first(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """On CPUs a product copies its second factor into another layout: let that be the smaller one. The
    barrier keeps the order, which the compiler would turn round."""
    return jax.lax.optimization_barrier(_product(matrix, x)).T
