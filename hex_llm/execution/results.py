"""What a step gives back, as rows of int32: packed on the device, read on the host.

A row: the chosen token (-1: none could be), its log-probability and rank, and the likeliest tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.execution.batch import Ints
from hex_llm.execution.sampling import Chosen
from hex_llm.sampling_params import MAX_LOGPROBS
from hex_llm.types import TokenLogprobs

LOGPROBS_SIZE = 2 + 2 * MAX_LOGPROBS
CHOICE_SIZE = 1 + LOGPROBS_SIZE


def pack_choices(chosen: Chosen) -> jax.Array:
    """[R, CHOICE_SIZE]"""
    logprobs = pack_logprobs((chosen.logprob, chosen.rank, chosen.top_ids, chosen.top_logprobs))
    return jnp.concatenate([chosen.token_ids[:, None], logprobs], axis=1)


def pack_logprobs(logprobs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """logprob [N], rank [N], the likeliest's ids and logprobs [N, MAX_LOGPROBS] -> [N, LOGPROBS_SIZE]"""
    logprob, rank, top_ids, top_logprobs = logprobs
    return jnp.concatenate([_bits(logprob)[:, None], rank[:, None], top_ids, _bits(top_logprobs)], axis=1)


def _bits(floats: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(floats.astype(jnp.float32), jnp.int32)


def unpack_choice(row: Ints, num_top: int) -> TokenLogprobs:
    return unpack_logprobs(row[1:], num_top)


def unpack_logprobs(row: Ints, num_top: int) -> TokenLogprobs:
    floats = row.view(np.float32)
    return TokenLogprobs(
        float(floats[0]),
        int(row[1]),
        row[2 : 2 + num_top].tolist(),
        floats[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + num_top].tolist(),
    )
