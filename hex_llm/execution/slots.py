"""What the device remembers of every running sequence, one row of int32 for each slot.

A row holds how its tokens are chosen, its KV blocks, its tokens so far, which tokens may come next, and its
logit bias. It is written whole when a sequence is admitted, so nothing of a slot's former owner is left; a
step notes the block that a row writes to and appends the token that it chooses, so that the next step can
be sent off before the host has seen it.
Floats travel as their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.execution.batch import Ints
from hex_llm.execution.sampling import BIASED, MASKED, Features, SamplingRows, wanted_features
from hex_llm.sampling_params import MAX_TOKEN_IDS, RANGES, SamplingParams

NOT_WANTED = -1


class Field(NamedTuple):
    size: int = 1
    dtype: Any = np.int32  # of 32 bits


SCALARS = {
    "temperature": Field(dtype=np.float32),
    "top_p": Field(dtype=np.float32),
    "min_p": Field(dtype=np.float32),
    "typical_p": Field(dtype=np.float32),
    "presence_penalty": Field(dtype=np.float32),
    "frequency_penalty": Field(dtype=np.float32),
    "repetition_penalty": Field(dtype=np.float32),
    "top_k": Field(),
    "seed": Field(2),
    "num_prompt": Field(),
    "num_logprobs": Field(),
    "constrained": Field(),
}


@dataclass(frozen=True)
class SlotLayout:
    """The fields of a row, one after another; a new one is one line."""

    num_slots: int  # the first is padding's
    max_len: int
    vocab_size: int
    table_width: int

    @cached_property
    def fields(self) -> dict[str, Field]:
        return {
            **SCALARS,
            "blocks": Field(self.table_width),
            "history": Field(self.max_len + 1),
            "allowed": Field(-(-self.vocab_size // 32)),  # one bit for each token
            "bias_ids": Field(MAX_TOKEN_IDS),
            "bias_values": Field(MAX_TOKEN_IDS, np.float32),
            "adapter": Field(),  # its slot, counted from 1; 0: none
        }

    @cached_property
    def columns(self) -> dict[str, slice]:
        ends = accumulate(field.size for field in self.fields.values())
        return {
            name: slice(end - field.size, end)
            for (name, field), end in zip(self.fields.items(), ends, strict=True)
        }

    @property
    def num_scalars(self) -> int:
        return self.columns["blocks"].start

    @property
    def width(self) -> int:
        return sum(field.size for field in self.fields.values())

    def record(
        self,
        params: SamplingParams,
        seed: int,
        num_prompt: int,
        token_ids: list[int],
        blocks: list[int],
        allowed: Ints | None,
        adapter: int = 0,
    ) -> Ints:
        """A sequence's whole row; `allowed` None: every token is."""
        bias = params.logit_bias or {}
        values: dict[str, Any] = {
            **{name: [getattr(params, name)] for name in RANGES},
            "top_k": [min(max(params.top_k, 0), self.vocab_size)],
            "seed": np.array([seed], np.uint64).view(np.int32),
            "num_prompt": [num_prompt],
            "num_logprobs": [NOT_WANTED if params.logprobs is None else params.logprobs],
            "constrained": [MASKED * (allowed is not None) | BIASED * bool(bias)],
            "blocks": blocks,
            "history": token_ids,
            "allowed": () if allowed is None else allowed,
            "bias_ids": [*bias, *[-1] * (MAX_TOKEN_IDS - len(bias))],
            "bias_values": list(bias.values()),
            "adapter": [adapter],
        }
        row = np.zeros(self.width, np.int32)
        for name, field in self.fields.items():
            start = self.columns[name].start
            row[start : start + len(values[name])] = np.asarray(values[name], field.dtype).view(np.int32)
        return row

    def features(self, row: Ints) -> Features:
        """What a `record` asks of the choice of tokens."""
        return wanted_features(
            _sampling(self, row[None, : self.num_scalars], lambda bits: bits.view(np.float32))
        )

    def adapter_of(self, row: Ints) -> int:
        return int(row[self.columns["adapter"].start])

    def empty(self) -> Ints:
        """The rows of all slots before anything runs; padding is greedy."""
        rows = np.zeros((self.num_slots, self.width), np.int32)
        rows[:] = self.record(SamplingParams(temperature=0), 0, 0, [], [], None)
        return rows


class SlotRows:
    """The rows of some slots inside a step; what is not asked for is not gathered."""

    def __init__(self, layout: SlotLayout, state: jax.Array, slots: jax.Array) -> None:
        self._layout, self._state, self._slots = layout, state, slots

    def sampling(self, num_tokens: jax.Array) -> SamplingRows:
        """`num_tokens` [R]: of each sequence, up to which the next one is chosen."""
        scalars = self._state[self._slots, : self._layout.num_scalars]
        return _sampling(self._layout, scalars, _as_floats)._replace(num_tokens=num_tokens)

    def tables(self) -> jax.Array:
        return self._gathered("blocks")

    def history(self) -> jax.Array:
        return self._gathered("history")

    def allowed(self) -> jax.Array:
        return self._gathered("allowed")

    def bias(self) -> tuple[jax.Array, jax.Array]:
        return self._gathered("bias_ids"), _as_floats(self._gathered("bias_values"))

    def adapters(self) -> jax.Array:
        return self._gathered("adapter")[:, 0]

    def token_at(self, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """[T]: the token at a position of a row's sequence."""
        columns = self._layout.columns["history"].start + positions
        return self._state[self._slots[rows], columns]

    def _gathered(self, name: str) -> jax.Array:
        return self._state[self._slots, self._layout.columns[name]]


def _as_floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _sampling(layout: SlotLayout, scalars: Any, as_floats: Callable[[Any], Any]) -> SamplingRows:
    """On the host and in the compiled step alike; as if there was only the prompt."""
    values = {}
    for name, field in SCALARS.items():
        bits = scalars[:, layout.columns[name]]
        value = as_floats(bits) if field.dtype == np.float32 else bits
        values[name] = value if field.size > 1 else value[:, 0]
    return SamplingRows(**values, num_tokens=values["num_prompt"])


def append_tokens(
    layout: SlotLayout, state: jax.Array, slots: jax.Array, positions: jax.Array, token_ids: jax.Array
) -> jax.Array:
    """Writes each slot's chosen token at its position; -1, no choice, is written as token 0."""
    return state.at[slots, layout.columns["history"].start + positions].set(jnp.maximum(token_ids, 0))


def note_blocks(
    layout: SlotLayout, state: jax.Array, slots: jax.Array, nth: jax.Array, blocks: jax.Array
) -> jax.Array:
    """Writes each slot's nth block: sequences grow one by one."""
    return state.at[slots, layout.columns["blocks"].start + nth].set(blocks)
