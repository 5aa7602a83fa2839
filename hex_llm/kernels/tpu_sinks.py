"""JAX's ragged kernel for TPUs with sinks: scores beside those of the keys, with values of 0.

A sink takes its part of a row's weights from what the keys gave. The kernel leaves the maximum and the sum of
each row in its memory, so that can be done when it has ended with a block of rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as bundled

LANES = 128  # what a TPU holds side by side: heads and the rows of a table are filled up to multiples of it


def attention_with_sinks(
    q: Array,
    pages: Array,
    lengths: Array,
    tables: Array,
    ends: Array,
    num: Array,
    *,
    sinks: Array,  # [K, G]
    num_kv_pages_per_block: int,
    num_queries_per_block: int,
    **settings: Any,
) -> Array:
    """As `ragged_paged_attention`, whose other arguments these are."""
    (num_rows, num_heads, head_dim), (page_size, num_combined) = q.shape, pages.shape[1:3]
    heads, combined = bundled.get_min_heads_per_blk(num_heads, num_combined, q.dtype, pages.dtype)
    num_kv_heads, group = combined // 2, sinks.shape[1]
    rows = num_queries_per_block
    queries = pl.BlockSpec((rows, heads, head_dim), lambda i, j, *_: (j, i, 0))
    sums = pltpu.VMEM((num_kv_heads, rows * group, LANES), jnp.float32)
    attend = pl.pallas_call(
        partial(_kernel, **settings),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            in_specs=[
                pl.BlockSpec((num_kv_heads, group, LANES), lambda i, j, *_: (i, 0, 0)),
                queries,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=queries,
            grid=(num_heads // heads, pl.cdiv(num_rows, rows)),
            scratch_shapes=[
                pltpu.VMEM((2, num_kv_pages_per_block, page_size, combined, head_dim), pages.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                sums,
                sums,
                pltpu.VMEM((rows, heads, head_dim), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="ragged_paged_attention_with_sinks",
    )
    wide = jnp.broadcast_to(sinks.astype(jnp.float32)[..., None], (*sinks.shape, LANES))
    state = jnp.zeros(2, jnp.int32)  # which sequence and which buffer come next
    out: Array = attend(lengths, tables, ends, state, num, wide, q, pages)
    return out


def _kernel(*refs: Any, **settings: Any) -> None:
    sinks, out, (sums, peaks, acc) = refs[5], refs[8], refs[-3:]
    bundled.ragged_paged_attention_kernel(*refs[:5], *refs[6:], **settings)
    num_kv_heads, group, _ = sinks.shape
    rows, _, head_dim = out.shape
    for i in range(num_kv_heads):
        heads = slice(i * group, (i + 1) * group)
        told = (peaks[i] + jnp.log(sums[i])).reshape(rows, group, LANES)
        kept = jnp.concatenate([jax.nn.sigmoid(told - sinks[i][None])] * (head_dim // LANES), axis=2)
        out[:, heads, :] = (acc[:, heads, :] * kept).astype(out.dtype)
