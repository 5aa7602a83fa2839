"""The write of K and V into pages, as a Pallas-Triton kernel: a program takes a token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hex_llm.kernels.attention import KVPages, QuantizedPages, quantized
from hex_llm.kernels.gpu_launch import index_grid, launched, next_power


def write_kv(k: Array, v: Array, pages: KVPages, slots: Array) -> tuple[KVPages, Array]:
    """The pages with k and v [T, K, H] at the slots, in place where the pages are donated; and semaphores
    [T, K], all 0: at their block's first row splits count who has ended, and the last one merges."""
    num_rows, num_kv_heads, _ = k.shape
    # As the pages lie: what makes k and v, usually a rotation, then writes both in one go.
    kv = jnp.stack([k, v], axis=2).reshape(num_rows, -1)
    arrays: tuple[Array, ...]
    write: Callable[..., None]
    if isinstance(pages, QuantizedPages):
        arrays = pages.words, pages.scales
        write = partial(_write_quantized, block_size=pages.shape[1], dtype=pages.dtype)
    else:
        arrays, kv, write = (pages,), kv.astype(pages.dtype), _write_plain
    held = arrays[0]
    arrays = held.reshape(-1, math.prod(held.shape[2:])), *arrays[1:]

    def write_kernel(slots_ref: Any, kv_ref: Any, _: Any, pages_refs: Any, semaphores_ref: Any) -> None:
        row = pl.program_id(0)
        write(row, slots_ref[row], kv_ref, *pages_refs)
        head = lax.iota(jnp.int32, next_power(num_kv_heads))
        plgpu.store(semaphores_ref.at[row, head], jnp.zeros_like(head), mask=head < num_kv_heads)

    semaphores = jax.ShapeDtypeStruct((num_rows, num_kv_heads), jnp.int32)
    aliases = {2 + i: i for i in range(len(arrays))}
    call = launched(write_kernel, (num_rows,), [arrays, semaphores], warps=4, stages=1, aliases=aliases)
    (new, *scales), new_semaphores = call(slots, kv, arrays)
    new = new.reshape(held.shape)
    if isinstance(pages, QuantizedPages):
        new = replace(pages, words=new, scales=scales[0])
    return new, new_semaphores


def _write_plain(row: Array, slot: Array, kv_ref: Any, pages_ref: Any) -> None:
    width = kv_ref.shape[1]
    place = lax.iota(jnp.int32, next_power(width))
    inside = place < width
    plgpu.store(pages_ref.at[slot, place], plgpu.load(kv_ref.at[row, place], mask=inside), mask=inside)


def _write_quantized(
    row: Array, slot: Array, kv_ref: Any, words_ref: Any, scales_ref: Any, *, block_size: int, dtype: Any
) -> None:
    num: int = 2 * scales_ref.shape[2]  # keys and values, in turns
    width = words_ref.shape[1] // num
    which, column = lax.iota(jnp.int32, next_power(num)), lax.iota(jnp.int32, next_power(width))
    at = index_grid(which, column[None, :])
    inside = (at[0] < num) & (at[1] < width)
    halves = (
        plgpu.load(kv_ref.at[row, at[0] * 2 * width + at[1] + start], mask=inside, other=0)
        for start in (0, width)
    )
    words, scales = quantized(halves, dtype)
    plgpu.store(words_ref.at[slot, at[0] * width + at[1]], words, mask=inside)
    place = lax.div(slot, block_size), lax.rem(which, 2), lax.div(which, 2), lax.rem(slot, block_size)
    plgpu.store(scales_ref.at[place], scales, mask=which < num)
