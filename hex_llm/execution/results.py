"""What a step gives back, as rows of int32: packed on the device, read on the host under the same names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from hex_llm.execution.batch import Ints
from hex_llm.execution.sampling import Chosen
from hex_llm.sampling_params import MAX_LOGPROBS
from hex_llm.types import TokenLogprobs

MAX_CHOSEN = 1  # tokens that a row can bring in one step
# Every field is of 32 bits. A token has those of sampling.Chosen, in its order.
TOKEN = np.dtype(
    [
        ("token_id", np.int32),
        ("logprob", np.float32),
        ("rank", np.int32),
        ("top_ids", np.int32, MAX_LOGPROBS),
        ("top_logprobs", np.float32, MAX_LOGPROBS),
    ]
)
CHOICE = np.dtype([("num_tokens", np.int32), ("tokens", TOKEN, (MAX_CHOSEN,))])  # none: none could be chosen
CHOICE_SIZE = CHOICE.itemsize // 4
FIRST_TOKEN = CHOICE_SIZE - MAX_CHOSEN * TOKEN.itemsize // 4  # the column of its id: tokens are the last


def pack_choices(chosen: Chosen) -> jax.Array:
    """[R, CHOICE_SIZE]"""
    num_tokens = (chosen.token_ids >= 0).astype(jnp.int32)
    return jnp.concatenate([num_tokens[:, None], pack_tokens(chosen)], axis=1)


def pack_tokens(chosen: Chosen) -> jax.Array:
    """[R, size of TOKEN]"""
    rows = len(chosen.token_ids)
    return jnp.concatenate([_bits(field).reshape(rows, -1) for field in chosen], axis=1)


def first_token_ids(choices: jax.Array) -> jax.Array:
    """[R]: of packed choices; -1: none could be chosen."""
    return choices[:, FIRST_TOKEN]


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


class Choices:
    """Those of a step's rows, on the host."""

    def __init__(self, packed: Ints) -> None:
        self._rows: npt.NDArray[Any] = packed.view(CHOICE)[:, 0]

    @property
    def token_ids(self) -> list[list[int]]:
        """Of each row; empty: none could be chosen."""
        all_ids = self._rows["tokens"]["token_id"].tolist()
        return [ids[:n] for ids, n in zip(all_ids, self._rows["num_tokens"].tolist(), strict=True)]

    def logprobs(self, row: int, num_tokens: int, num_top: int) -> list[TokenLogprobs]:
        """Of the first tokens of a row."""
        return unpack_logprobs(self._rows[row]["tokens"][:num_tokens], num_top)


def likeliest(logprobs: npt.NDArray[Any], token_ids: Ints, num_top: int) -> list[TokenLogprobs]:
    """Of rows of the whole vocabulary, with a token for each; of equal ones the first token first."""
    told = []
    for row, token_id in zip(logprobs, token_ids, strict=False):  # there may be tokens of padding
        top = np.argsort(-row, kind="stable")[:num_top]
        rank = 1 + int(np.count_nonzero(row > row[token_id]))
        told.append(TokenLogprobs(float(row[token_id]), rank, top.tolist(), row[top].tolist()))
    return told


def unpack_logprobs(tokens: npt.NDArray[Any], num_top: int) -> list[TokenLogprobs]:
    """Of rows of TOKEN."""
    return [
        TokenLogprobs(
            float(token["logprob"]),
            int(token["rank"]),
            token["top_ids"][:num_top].tolist(),
            token["top_logprobs"][:num_top].tolist(),
        )
        for token in tokens
    ]
