"""What the device remembers of every running sequence, one row of int32 for each slot.

A row holds how its tokens are chosen, its tokens so far, which tokens may come next, and its logit bias. It
is written whole when a sequence is admitted, so nothing of a slot's former owner is left; the step itself
appends the token that it chooses, which is why the next step can be sent off before the host has seen it.
Floats travel as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.execution.batch import Ints
from hex_llm.execution.sampling import BIASED, MASKED, Features, SamplingRows, wanted
from hex_llm.sampling_params import MAX_TOKEN_IDS, RANGES, SamplingParams

FLOATS = tuple(RANGES)
NUM_SCALARS = 13  # the floats, then the whole numbers
TOP_K, SEED, NUM_PROMPT, NUM_LOGPROBS, CONSTRAINED = 7, 8, 10, 11, 12
NOT_WANTED = -1


@dataclass(frozen=True)
class SlotLayout:
    """Where in a row things are."""

    num_slots: int  # the first is padding's
    max_len: int
    vocab_size: int

    @property
    def history(self) -> slice:
        return slice(NUM_SCALARS, NUM_SCALARS + self.max_len + 1)

    @property
    def allowed(self) -> slice:
        """One bit for each token."""
        start = self.history.stop
        return slice(start, start + -(-self.vocab_size // 32))

    @property
    def bias_ids(self) -> slice:
        start = self.allowed.stop
        return slice(start, start + MAX_TOKEN_IDS)

    @property
    def bias_values(self) -> slice:
        start = self.bias_ids.stop
        return slice(start, start + MAX_TOKEN_IDS)

    @property
    def width(self) -> int:
        return self.bias_values.stop

    def record(
        self,
        params: SamplingParams,
        seed: int,
        num_prompt: int,
        token_ids: list[int],
        allowed: Ints | None,
    ) -> Ints:
        """A sequence's whole row; `allowed` None: every token is."""
        row = np.zeros(self.width, np.int32)
        row[: len(FLOATS)] = np.array([getattr(params, name) for name in FLOATS], np.float32).view(np.int32)
        row[TOP_K] = min(max(params.top_k, 0), self.vocab_size)
        row[SEED : SEED + 2] = np.array([seed], np.uint64).view(np.int32)
        row[NUM_PROMPT] = num_prompt
        row[NUM_LOGPROBS] = NOT_WANTED if params.logprobs is None else params.logprobs
        row[self.history][: len(token_ids)] = token_ids
        row[self.bias_ids] = -1
        if allowed is not None:
            row[CONSTRAINED] |= MASKED
            row[self.allowed] = allowed
        if params.logit_bias:
            row[CONSTRAINED] |= BIASED
            row[self.bias_ids][: len(params.logit_bias)] = list(params.logit_bias)
            values = np.array(list(params.logit_bias.values()), np.float32)
            row[self.bias_values][: len(values)] = values.view(np.int32)
        return row

    def wants(self, row: Ints) -> Features:
        """What a `record` asks of the choice of tokens."""
        scalars = row[None, :NUM_SCALARS]
        return wanted(_sampling(scalars, scalars[:, : len(FLOATS)].view(np.float32), scalars[:, NUM_PROMPT]))

    def empty(self) -> Ints:
        """The rows of all slots before anything runs; padding is greedy."""
        rows = np.zeros((self.num_slots, self.width), np.int32)
        rows[:] = self.record(SamplingParams(temperature=0), 0, 0, [], None)
        return rows


class SlotRows:
    """The rows of some slots inside a step; what is not asked for is not gathered."""

    def __init__(self, layout: SlotLayout, state: jax.Array, slots: jax.Array) -> None:
        self._layout, self._state, self._slots = layout, state, slots

    def sampling(self, num_tokens: jax.Array) -> SamplingRows:
        """`num_tokens` [R]: of each sequence, up to which the next one is chosen."""
        scalars = self._columns(slice(0, NUM_SCALARS))
        floats = jax.lax.bitcast_convert_type(scalars[:, : len(FLOATS)], jnp.float32)
        return _sampling(scalars, floats, num_tokens)

    def history(self) -> jax.Array:
        return self._columns(self._layout.history)

    def allowed(self) -> jax.Array:
        return self._columns(self._layout.allowed)

    def bias(self) -> tuple[jax.Array, jax.Array]:
        values = jax.lax.bitcast_convert_type(self._columns(self._layout.bias_values), jnp.float32)
        return self._columns(self._layout.bias_ids), values

    def token_at(self, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """[T]: the token at a position of a row's sequence."""
        columns = self._layout.history.start + positions
        return self._state[self._slots[rows], columns]

    def _columns(self, columns: slice) -> Any:
        return self._state[self._slots, columns]


def _sampling(scalars: Any, floats: Any, num_tokens: Any) -> SamplingRows:
    """On the host and in the compiled step alike."""
    return SamplingRows(
        **{name: floats[:, i] for i, name in enumerate(FLOATS)},
        top_k=scalars[:, TOP_K],
        seed=scalars[:, SEED : SEED + 2],
        num_prompt=scalars[:, NUM_PROMPT],
        num_tokens=num_tokens,
        num_logprobs=scalars[:, NUM_LOGPROBS],
        constrained=scalars[:, CONSTRAINED],
    )


def append_tokens(
    layout: SlotLayout, state: jax.Array, slots: jax.Array, positions: jax.Array, token_ids: jax.Array
) -> jax.Array:
    """Writes each slot's chosen token at its position; -1, no choice, is written as token 0."""
    return state.at[slots, layout.history.start + positions].set(jnp.maximum(token_ids, 0))
