"""What forms of matrices share; what each can be asked, models/linear.py: Matrix says."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from hex_llm.kernels.adapters import Norm, Pending
from hex_llm.kernels.experts import Activation


class Begun(NamedTuple):
    """A product, for who makes heads of it."""

    product: Array  # [T, *outputs]; or in parts [splits, T, *outputs], to be summed
    pending: Pending | None = None  # what is yet to be added to it
    dtype: Any = None  # of the sum of parts


class PlainMatrix:
    """One that does all by its product."""

    takes_rounded = False

    def matmul(self, x: Any) -> Array:
        raise NotImplementedError

    def gated(self, x: Any, activation: Activation, bias: Array | None = None) -> Array:
        both = self.matmul(x)  # [T, F, 2]
        both = both if bias is None else both + bias
        return activation(both[..., 0]) * both[..., 1]

    def begin(self, x: Any, bias: Array | None) -> Begun | None:
        return None

    def join(
        self, around: Array, x: Any, bias: Array | None, norm: Norm, rounds: bool
    ) -> tuple[Array, Any] | None:
        return None


class FusedMatrix(PlainMatrix):
    """One whose gates and ups come out apart: C is 2 for them, else 1."""

    outputs: tuple[int, ...]

    def products(self, x: Array) -> Array:
        """[C, T, N]"""
        raise NotImplementedError

    def matmul(self, x: Array) -> Array:
        return jnp.moveaxis(self.products(x), 0, -1).reshape(len(x), *self.outputs)

    def gated(self, x: Array, activation: Activation, bias: Array | None = None) -> Array:
        gates, ups = self.products(x)
        if bias is not None:
            gates, ups = gates + bias[:, 0], ups + bias[:, 1]
        return activation(gates) * ups
