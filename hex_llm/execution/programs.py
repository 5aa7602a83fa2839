"""What runs on the devices, as traced functions: one step of the model, the logits of its rows, and the
choice of tokens.

They are programs of their own: a step exists for every number of tokens, logits for some numbers of rows, the
choice for a few, and these do not depend on each other. Steps of decodes alone give the logits themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution.adapters import AdapterLayout
from hex_llm.execution.batch import StepShape, batch_of, num_choices, parts_of
from hex_llm.execution.results import CHOICE_SIZE, first_token_ids, pack_choices, pack_tokens
from hex_llm.execution.sampling import Chosen, Features, adjusted, choose, logprobs_of, no_logprobs, tokens
from hex_llm.execution.slots import SlotLayout, SlotRows, append_tokens, note_blocks
from hex_llm.kernels.adapters import AdapterKernels, Owners
from hex_llm.kernels.attention import AttentionKernels, KVPages, Options
from hex_llm.kernels.experts import ExpertKernels, ExpertOptions
from hex_llm.kernels.sharded import ShardedMatrix
from hex_llm.models import decoder
from hex_llm.models.adapters import HEAD, Adapted, SlotMatrices, Slots, adapt, add_by_all
from hex_llm.models.linear import Matrix
from hex_llm.models.params import Weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import PAGES, TP

Pages = list[KVPages]
Program = Callable[..., Any]


@dataclass(frozen=True)
class Logits:
    """Of so many rows, filled up to a number that tokens are chosen for."""

    num_rows: int


@dataclass(frozen=True)
class Choose:
    """The choice of tokens for so many rows: whatever they want; or, in one of sampling.VARIANTS, of logits
    that may come from Adjust, without log-probabilities."""

    num_rows: int
    variant: Features | None = None


@dataclass(frozen=True)
class Adjust:
    """The logits of so many rows, with bias, penalties and masks."""

    num_rows: int


@dataclass(frozen=True)
class AddLogprobs:
    """Log-probabilities for what was chosen for so many rows."""

    num_rows: int


@dataclass(frozen=True)
class Write:
    """A write to so many slots: their whole rows, or which tokens may come next."""

    columns: Literal["all", "allowed"]
    num_rows: int


@dataclass(frozen=True)
class Finish:
    """The hidden states of so many tokens, where others than the last ones of rows are asked for."""

    num_rows: int


@dataclass(frozen=True)
class PromptLogprobs:
    num_rows: int
    of_all: bool = False  # of the whole vocabulary


@dataclass(frozen=True)
class WriteAdapter:
    """One adapter into its slot."""


@dataclass(frozen=True)
class TakeBlocks:
    """What so many blocks hold, in every layer."""

    num_blocks: int


@dataclass(frozen=True)
class PutBlocks:
    """The same, into other blocks."""

    num_blocks: int


Key = (
    StepShape
    | Logits
    | Choose
    | Adjust
    | AddLogprobs
    | Write
    | Finish
    | PromptLogprobs
    | WriteAdapter
    | TakeBlocks
    | PutBlocks
)


class ProgramContext(NamedTuple):
    """What all programs of an engine have in common."""

    spec: ModelSpec
    mesh: Mesh
    layout: SlotLayout
    max_choices: int  # rows that tokens can be chosen for
    attention_kernels: AttentionKernels
    expert_kernels: ExpertKernels
    adapters: AdapterLayout | None = None  # None: requests name none
    adapter_kernels: AdapterKernels = AdapterKernels(add_by_all)

    def lm_head(self, weights: Weights, adapters: Slots, which: Any) -> Any:
        """For rows whose adapters are in these slots."""
        return Adapted(weights.lm_head, adapters[HEAD], Owners(which), self.adapter_kernels)


class ProgramSpec(NamedTuple):
    """A program for the compiler."""

    function: Program
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]  # arguments that it may reuse
    out_shardings: Any  # where its results lie, each of them


def described(
    key: Key, context: ProgramContext, weights: Weights, pages: Pages, slots: jax.Array, adapters: Slots
) -> ProgramSpec:
    """Weights, pages, slots and adapters need not exist: their shapes and where they lie are enough."""
    spec, mesh, layout = context.spec, context.mesh, context.layout
    whole = NamedSharding(mesh, P())
    divides = spec.vocab_size % mesh.size == 0
    logits_lie = NamedSharding(mesh, P(None, TP) if divides else P())
    num_shards = mesh.size if divides else 1
    pages_lie = [NamedSharding(mesh, PAGES)] * len(pages)
    rows = _ints(3, context.max_choices)

    def lm_head(num_rows: int) -> Any:
        return context.lm_head(weights, adapters, _ints(num_rows)) if adapters else weights.lm_head

    def logits(num_rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, spec.vocab_size), jnp.float32, sharding=logits_lie)

    def hidden(num_rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, spec.hidden_size), weights.norm.dtype)

    match key:
        case StepShape():
            leaves, structure = jax.tree.flatten(weights)
            step = partial(forward, structure=structure, shape=key, context=context)
            given = logits_lie if key.gives_logits else whole
            results = (given, whole, whole, pages_lie, whole)
            arguments = (leaves, pages, slots, _ints(key.packed_size), *((adapters,) if key.adapted else ()))
            return ProgramSpec(step, arguments, (1, 2), results)
        case Logits(num_rows):
            last = partial(row_logits, num_rows=num_rows, spec=spec)
            return ProgramSpec(last, (lm_head(num_rows), hidden(context.max_choices)), (), logits_lie)
        case Choose(num_rows, variant):
            chosen = partial(choose_tokens, layout=layout, variant=variant, num_shards=num_shards)
            return ProgramSpec(chosen, (slots, logits(num_rows), rows), (0,), (whole, whole))
        case Adjust(num_rows):
            adjust = partial(adjusted_logits, layout=layout)
            return ProgramSpec(adjust, (slots, logits(num_rows), rows), (), logits_lie)
        case AddLogprobs(num_rows):
            choices = _ints(num_rows, CHOICE_SIZE)
            return ProgramSpec(add_logprobs, (logits(num_rows), choices), (1,), whole)
        case Write(columns, num_rows):
            part = slice(0, layout.width) if columns == "all" else layout.columns["allowed"]
            write = partial(write_rows, first_column=part.start)
            values = _ints(num_rows, part.stop - part.start)
            return ProgramSpec(write, (slots, _ints(num_rows), values), (0,), whole)
        case Finish(num_rows):
            leaves, structure = jax.tree.flatten(weights)
            ending = partial(finish, structure=structure, context=context)
            own = (adapters, _ints(num_rows)) if adapters else ()
            return ProgramSpec(ending, (leaves, hidden(num_rows), *own), (), whole)
        case PromptLogprobs(num_rows, of_all):
            logprobs = partial(vocabulary_logprobs if of_all else prompt_logprobs, spec=spec)
            return ProgramSpec(logprobs, (lm_head(num_rows), hidden(num_rows), _ints(num_rows)), (), whole)
        case TakeBlocks(num_blocks):
            return ProgramSpec(take_blocks, (pages, _ints(num_blocks)), (), pages_lie)
        case PutBlocks(num_blocks):
            arguments = (pages, _ints(num_blocks), jax.tree.map(partial(_blocks, num_blocks), pages))
            return ProgramSpec(put_blocks, arguments, (0,), pages_lie)
        case WriteAdapter():
            assert context.adapters is not None
            held = (adapters, context.adapters.described(), _ints())
            lie = jax.tree.map(lambda array: array.sharding, adapters)
            write_slot = partial(write_adapter, axis=0 if context.adapters.slots_first else -2)
            return ProgramSpec(write_slot, held, (0,), lie)


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _blocks(num: int, pages: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num, *pages.shape[1:]), pages.dtype, sharding=pages.sharding)


def take_blocks(pages: Pages, blocks: jax.Array) -> Pages:
    return jax.tree.map(lambda one: one[blocks], pages)


def put_blocks(pages: Pages, blocks: jax.Array, contents: Pages) -> Pages:
    return jax.tree.map(lambda one, new: one.at[blocks].set(new), pages, contents)


def forward(
    leaves: list[jax.Array],
    pages: Pages,
    slots: jax.Array,
    packed: jax.Array,
    adapters: Slots | None = None,
    *,
    structure: jax.tree_util.PyTreeDef,
    shape: StepShape,
    context: ProgramContext,
) -> tuple[jax.Array, jax.Array, jax.Array, Pages, jax.Array]:
    """What a step leaves: for the choice of tokens, of C = max_choices rows, `last` [C, D], the hidden state
    of each row's last token, or, if the shape gives them, its logits (as row_logits); and `rows` [3, C]: its
    slot, the slot where the choice goes (padding's if it is not wanted), the number of tokens before the
    choice; for who wants the hidden states of other tokens, `states` [T, D] of all, which `finish` takes; and
    the pages and slots. The weights come as leaves, which take the host a fifth less time than their tree.
    """
    weights: Weights = jax.tree.unflatten(structure, leaves)
    spec, _, layout, max_choices, attention_kernels, expert_kernels, *_ = context
    parts, block_size = parts_of(packed, shape), pages[0].shape[1]
    last_places, last_slots = parts.positions[parts.last_tokens], parts.kv_slots[parts.last_tokens]
    slots = note_blocks(layout, slots, parts.slots, last_places // block_size, last_slots // block_size)
    remembered = SlotRows(layout, slots, parts.slots)
    batch = batch_of(parts, remembered.tables(), shape)
    ending, lm_head = weights, weights.lm_head
    if adapters is not None:
        of_rows = remembered.adapters()
        lm_head = context.lm_head(weights, adapters, of_rows)
        ending = adapt(weights, adapters, of_rows, context.adapter_kernels)
        weights = adapt(weights, adapters, of_rows[batch.rows], context.adapter_kernels)
    x = decoder.embed(spec, weights, remembered.token_at(batch.rows, batch.positions))
    states, normed, pages = decoder.forward(
        spec, weights, x, parts.rope_lengths, pages, batch, attention_kernels, expert_kernels
    )
    more = (0, max_choices - shape.num_rows)
    asked = parts.last_tokens
    last = decoder.finished(spec, ending, states[asked], normed[asked], expert_kernels)
    if shape.gives_logits:
        last = row_logits(lm_head, last, num_rows=shape.num_rows, spec=spec)
    else:
        last = jnp.pad(last, (more, (0, 0)))
    rows = jnp.pad(jnp.stack([parts.slots, parts.chosen_slots, last_places + 1]), ((0, 0), more))
    return last, rows, states, pages, slots


def finish(
    leaves: list[jax.Array],
    states: jax.Array,
    adapters: Slots | None = None,
    which: jax.Array | None = None,
    *,
    structure: jax.tree_util.PyTreeDef,
    context: ProgramContext,
) -> jax.Array:
    """The hidden states [N, D] of tokens as a step left them, whose adapters are in these slots."""
    weights: Weights = jax.tree.unflatten(structure, leaves)
    if adapters is not None and which is not None:
        weights = adapt(weights, adapters, which, context.adapter_kernels)
    return decoder.finished(context.spec, weights, states, None, context.expert_kernels)


def row_logits(lm_head: Matrix, last: jax.Array, *, num_rows: int, spec: ModelSpec) -> jax.Array:
    """float32 [R, V] of the first rows, filled up with zeros to a number that tokens are chosen for."""
    logits = decoder.logits(spec, lm_head, last[:num_rows])
    return jnp.pad(logits, ((0, num_choices(num_rows) - num_rows), (0, 0)))


def choose_tokens(
    slots: jax.Array,
    logits: jax.Array,
    rows: jax.Array,
    *,
    layout: SlotLayout,
    variant: Features | None,
    num_shards: int,
) -> tuple[jax.Array, jax.Array]:
    """Packed choices (results.py), and the slots with the chosen tokens appended. num_shards: of logits."""
    own, chosen_slots, num_tokens = rows[:, : len(logits)]
    remembered = SlotRows(layout, slots, own)
    sampling = remembered.sampling(num_tokens)
    if variant is None:
        chosen = choose(logits, sampling, remembered, num_shards)
    else:
        chosen = Chosen(tokens(logits, sampling, variant, num_shards), *no_logprobs(len(logits)))
    return pack_choices(chosen), append_tokens(layout, slots, chosen_slots, num_tokens, chosen.token_ids)


def adjusted_logits(slots: jax.Array, logits: jax.Array, rows: jax.Array, *, layout: SlotLayout) -> jax.Array:
    own, _, num_tokens = rows[:, : len(logits)]
    remembered = SlotRows(layout, slots, own)
    return adjusted(logits, remembered.sampling(num_tokens), remembered, branches=False)


def add_logprobs(logits: jax.Array, choices: jax.Array) -> jax.Array:
    """The model's own, before anything was adjusted."""
    token_ids = first_token_ids(choices)
    return pack_choices(Chosen(token_ids, *logprobs_of(logits, token_ids)))


def prompt_logprobs(
    lm_head: Matrix, hidden: jax.Array, following: jax.Array, *, spec: ModelSpec
) -> jax.Array:
    """hidden [N, D] of some tokens, following [N] the tokens after them -> these, packed (results.py)."""
    return pack_tokens(Chosen(following, *logprobs_of(decoder.logits(spec, lm_head, hidden), following)))


def vocabulary_logprobs(lm_head: Matrix, hidden: jax.Array, _: jax.Array, *, spec: ModelSpec) -> jax.Array:
    """float32 [N, V], whatever follows."""
    return jax.nn.log_softmax(decoder.logits(spec, lm_head, hidden))


def write_rows(slots: jax.Array, which: jax.Array, values: jax.Array, *, first_column: int) -> jax.Array:
    return slots.at[which, first_column : first_column + values.shape[1]].set(values)


def write_adapter(adapters: Slots, values: Slots, slot: jax.Array, *, axis: int) -> Slots:
    """`values` are of one slot; `slot` counts from 1. `axis`: of the slots in `up`."""

    def write(of_slots: SlotMatrices, of_one: SlotMatrices) -> SlotMatrices:
        update = partial(jax.lax.dynamic_update_slice_in_dim, start_index=slot - 1)
        down, up = update(of_slots.down, of_one.down, axis=0), update(of_slots.up, of_one.up, axis=axis)
        return SlotMatrices(down, up, of_slots.fused)

    return {path: write(of_slots, values[path]) for path, of_slots in adapters.items()}


def split_by_head(attention_kernels: AttentionKernels, mesh: Mesh) -> AttentionKernels:
    """Each device attends with its own KV heads; nothing is exchanged. Norms may be of all heads together, so
    that heads are made before."""
    if mesh.size == 1:
        return attention_kernels
    attend = attention_kernels.attend
    heads, kv_heads = P(None, TP, None, None), P(None, TP, None)
    arrays = P(TP, None), heads, kv_heads, kv_heads, PAGES, P()
    specs: dict[str, Any] = {"in_specs": arrays, "out_specs": (heads, PAGES)}

    def split(q: Any, k: Any, v: Any, pages: Any, batch: Any, options: Options) -> tuple[Any, Any]:
        def alone(sinks: Any, *arrays: Any) -> tuple[Any, Any]:
            return partial(attend, options=options._replace(sinks=sinks))(*arrays)

        local = jax.shard_map(alone, mesh=mesh, check_vma=False, **specs)
        out: tuple[Any, Any] = local(options.sinks, q, k, v, pages, batch)
        return out

    return AttentionKernels(split)


def split_by_width(expert_kernels: ExpertKernels, mesh: Mesh) -> ExpertKernels:
    """Each device has its own part of every expert's width; what they say is summed over the devices."""
    if mesh.size == 1:
        return expert_kernels
    run, width = expert_kernels.run, P(None, None, TP)

    def split(x: Any, chosen: Any, scores: Any, gate_up: Any, down: Any, options: ExpertOptions) -> Any:
        def summed(bias: Any, *arrays: Any) -> Any:
            return jax.lax.psum(partial(run, options=options._replace(bias=bias))(*arrays), TP)

        shards = [
            (one.shard, one.spec) if isinstance(one, ShardedMatrix) else (one, width)
            for one in (gate_up, down)
        ]
        matrices, lie = zip(*shards, strict=True)
        specs = width, P(), P(), P(), *lie
        local = jax.shard_map(summed, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        return local(options.bias, x, chosen, scores, *matrices)

    return expert_kernels._replace(run=split)
