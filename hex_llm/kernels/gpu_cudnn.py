"""Causal attention of a step's own tokens by cuDNN, which is faster at it than our kernel but reads no pages.

It knows nothing of what is cached: it says how much weight each row has seen, so that gpu_kernel.py can go
on. The way to it is JAX's own, but not a public one: sequences that lie one after another need offsets, which
jax.nn.dot_product_attention does not take. So it is tried once for each kind of layer before it is relied on.
"""

from __future__ import annotations

import logging
import threading
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax import Array

log = logging.getLogger(__name__)

_trying = threading.Lock()


def can_attend(num_kv_heads: int, group: int, head_dim: int, window: int | None) -> bool:
    """Whether cuDNN is there and has a bfloat16 kernel for layers like this; compiles two small ones, once
    however many threads ask."""
    with _trying:
        return jax.default_backend() == "gpu" and _compiles(num_kv_heads, group, head_dim, window)


@cache
def _compiles(num_kv_heads: int, group: int, head_dim: int, window: int | None) -> bool:
    q = jax.ShapeDtypeStruct((256, num_kv_heads, group, head_dim), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((256, num_kv_heads, head_dim), jnp.bfloat16)
    attend = jax.jit(partial(causal, window=window, scale=1.0))
    try:
        for num_seqs in (1, 2):
            attend.lower(q, kv, kv, jax.ShapeDtypeStruct((num_seqs,), jnp.int32)).compile()
    except Exception as error:  # whatever it is: our own kernel does the same
        log.warning("prefills without cuDNN for heads of %d: %s", head_dim, str(error)[:300])
        return False
    log.info("long prefills begin with cuDNN")
    return True


def causal(
    q: Array,  # [T, K, G, H]
    k: Array,  # [T, K, H]
    v: Array,
    lengths: Array,  # [S] rows of each sequence, one sequence after another
    *,
    window: int | None,
    scale: float,
) -> tuple[Array, Array]:
    """Attention out [T, K, G, H], and the log of the sum of weights [S, K * G, T], of each sequence's rows by
    their place in it. What belongs to no row of a sequence is undefined in both."""
    # Here, since a JAX that no longer has it is one more reason that can_attend may find.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    num_rows, num_kv_heads, group, head_dim = q.shape
    offsets = None
    if len(lengths) > 1:
        offsets = jnp.append(jnp.zeros(1, jnp.int32), jnp.cumsum(lengths))[None]
        lengths = lengths[None]
    out, logs = dot_product_attention(
        q.reshape(1, num_rows, num_kv_heads * group, head_dim),
        k[None],
        v[None],
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
        return_residual=True,
    )
    return out.reshape(q.shape), logs
