"""What runs on the devices, as traced functions: one step of the model, and the choice of tokens after it.

They are two programs, not one: a step exists for every shape, the choice only for a few numbers of rows, and
together they would take half as long again to compile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hex_llm.engine.batch import StepShape, unpack
from hex_llm.engine.results import pack_choices, pack_logprobs
from hex_llm.engine.sampling import Wants, choose, logprobs_of
from hex_llm.engine.slots import SlotLayout, SlotRows, append_tokens
from hex_llm.kernels.attention import PagedAttention
from hex_llm.models import decoder
from hex_llm.models.params import Weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import PAGES, TP

Pages = list[jax.Array]


def forward(
    weights: Weights,
    pages: Pages,
    slots: jax.Array,
    packed: jax.Array,
    *,
    shape: StepShape,
    spec: ModelSpec,
    layout: SlotLayout,
    attend: PagedAttention,
) -> tuple[jax.Array, jax.Array, jax.Array | None, Pages]:
    """What a step leaves for the choice of tokens, and the pages. R is shape.num_choices.

    logits [R, V] float32 at the last token of each row; rows [3, R]: its slot, the slot where the choice goes
    (padding's if it is not wanted), the number of tokens before the choice; and, for those who want the log-
    probabilities of their prompt, hidden [T, D] of the prefilled tokens.
    """
    inputs = unpack(packed, shape)
    batch = inputs.batch
    token_ids = SlotRows(layout, slots, inputs.slots).token_at(batch.sequences, batch.positions)
    hidden, pages = decoder.forward(spec, weights, token_ids, inputs.spans, pages, batch, attend)
    logits = decoder.logits(spec, weights, hidden[inputs.last_tokens])
    num_tokens = batch.positions[inputs.last_tokens] + 1
    rows = jnp.stack([inputs.slots, inputs.chosen_slots, num_tokens])
    more = shape.num_choices - shape.num_rows
    logits, rows = jnp.pad(logits, ((0, more), (0, 0))), jnp.pad(rows, ((0, 0), (0, more)))
    return logits, rows, hidden[shape.num_decodes :] if shape.num_prefills else None, pages


def choose_tokens(
    slots: jax.Array, logits: jax.Array, rows: jax.Array, *, layout: SlotLayout, most: Wants
) -> tuple[jax.Array, jax.Array]:
    """Packed choices (results.py), and the slots with the chosen tokens appended."""
    own, chosen_slots, num_tokens = rows
    remembered = SlotRows(layout, slots, own)
    chosen = choose(logits, remembered.sampling(num_tokens), remembered, most)
    return pack_choices(chosen), append_tokens(layout, slots, chosen_slots, num_tokens, chosen.token_ids)


def prompt_logprobs(
    weights: Weights, hidden: jax.Array, following: jax.Array, *, spec: ModelSpec
) -> jax.Array:
    """hidden [N, D] of some tokens, following [N] the tokens after them -> packed log-probabilities."""
    return pack_logprobs(logprobs_of(decoder.logits(spec, weights, hidden), following))


def write_rows(slots: jax.Array, which: jax.Array, values: jax.Array, *, first_column: int) -> jax.Array:
    return slots.at[which, first_column : first_column + values.shape[1]].set(values)


def split_by_head(attend: PagedAttention, mesh: Mesh) -> PagedAttention:
    """Each device attends with its own KV heads; nothing is exchanged."""
    if mesh.size == 1:
        return attend
    q, kv, whole = P(None, TP, None, None), P(None, TP, None), P()

    def split(*arrays: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        local = jax.shard_map(
            partial(attend, **options),
            mesh=mesh,
            in_specs=(q, kv, kv, PAGES, whole),
            out_specs=(q, PAGES),
            check_vma=False,
        )
        out: tuple[jax.Array, jax.Array] = local(*arrays)
        return out

    return split
