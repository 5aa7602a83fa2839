"""The sampler against itself in other company, and the log-probabilities that it tells."""

from __future__ import annotations

import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hex_llm.execution import programs, sampling
from hex_llm.execution.sampling import BLOCK, Chosen, Features, choose, logprobs_of, tokens
from hex_llm.execution.slots import SlotLayout
from hex_llm.parallel.shardings import make_mesh
from hex_llm.sampling_params import MAX_LOGPROBS
from tests.execution.sampled import WANTS, N, Slots, V, chosen, logits_of, rows_of, slots_of


def assert_same(a: Chosen, b: Chosen) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("harm", ["nan", "inf", "all -inf", "nan under the mask", "nothing allowed"])
def test_a_harmed_row_is_told_and_harms_no_other(harm: str) -> None:
    wants = [{**want, "num_logprobs": 3} for want in (WANTS * 3)[:N]]
    victims = [N - 2, N - 1]
    wants[-2:] = [{}, {"temperature": 1.0, "top_p": 0.8}]
    if harm in ("nan under the mask", "nothing allowed"):
        wants = [want if row not in victims else {**want, "constrained": 1} for row, want in enumerate(wants)]
    slots = slots_of(N, V)
    logits, words = logits_of(N, V), slots.words.at[:, 8].set(-2)
    slots = Slots(slots.ids, words, slots.biased)
    before = chosen(logits, rows_of(wants), slots)
    value = {"nan": jnp.nan, "nan under the mask": jnp.nan, "inf": jnp.inf, "all -inf": -jnp.inf}.get(harm)
    at = slice(None) if harm == "all -inf" else 256  # token 256 is forbidden
    for row in victims:
        if value is None:
            words = words.at[row].set(0)
        else:
            logits = logits.at[row, at].set(value)
    after = chosen(logits, rows_of(wants), Slots(slots.ids, words, slots.biased))
    assert (before.token_ids >= 0).all()
    assert after.token_ids[jnp.array(victims)].tolist() == [-1, -1]
    healthy = slice(0, N - 2)
    assert_same(Chosen(*(x[healthy] for x in after)), Chosen(*(x[healthy] for x in before)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_harmed_row_of_a_greedy_batch_is_told(value: float) -> None:
    rows, slots, logits = rows_of([{}] * N), slots_of(N, V), logits_of(N, V)
    expected = jnp.argmax(logits, axis=-1).at[2].set(-1).tolist()
    assert chosen(logits.at[2, 50].set(value), rows, slots).token_ids.tolist() == expected
    assert chosen(logits.at[2].set(-jnp.inf), rows, slots).token_ids.tolist() == expected


def test_padding_asks_for_nothing() -> None:
    """Rows of zeros change no other row, and no logprobs are made for them."""
    wants = [{**want, "num_logprobs": -1} for want in (WANTS * 3)[:N]]
    rows, slots, logits = rows_of(wants), slots_of(N, V), logits_of(N, V)
    full = chosen(logits, rows, slots)
    padded = jax.tree.map(lambda x: x.at[-5:].set(0), rows)
    for greedy in (False, True):
        if greedy:
            padded = jax.tree.map(jnp.zeros_like, padded)
        out = chosen(logits.at[-5:].set(0.0), padded, jax.tree.map(lambda x: x.at[-5:].set(0), slots))
        expected = jnp.argmax(logits, axis=-1) if greedy else full.token_ids
        np.testing.assert_array_equal(out.token_ids[:-5], expected[:-5])
        assert all((x == 0).all() for x in out[1:])


def test_a_row_does_not_depend_on_its_company() -> None:
    """Each kind of row alone, and at each place of a batch of 32 among others: the same token."""
    slots, logits = slots_of(len(WANTS), V), logits_of(len(WANTS), V)
    alone = [
        int(
            chosen(
                logits[i : i + 1],
                rows_of([want], seeds=[i]),
                jax.tree.map(lambda x, i=i: x[i : i + 1], slots),
            ).token_ids[0]
        )
        for i, want in enumerate(WANTS)
    ]
    for shift in range(N):
        order = (np.arange(N) * 5 + shift) % len(WANTS)
        batch = rows_of([WANTS[i] for i in order], seeds=order)
        among = chosen(logits[order], batch, jax.tree.map(lambda x, order=order: x[order], slots)).token_ids
        assert among.tolist() == [alone[i] for i in order]


def test_logprobs_are_the_models_own() -> None:
    wants = [
        {"temperature": 2.0, "top_k": 50, "repetition_penalty": 1.5, "constrained": 2, "num_logprobs": 20}
    ] * N
    logits = logits_of(N, V).at[:, 7].set(-jnp.inf)
    out = chosen(logits, rows_of(wants), slots_of(N, V))
    expected = torch.log_softmax(torch.tensor(np.asarray(logits)), dim=-1).numpy()
    at = np.asarray(out.token_ids)
    np.testing.assert_allclose(out.logprob, expected[np.arange(N), at], atol=1e-5)
    order = np.argsort(-expected, axis=-1)
    np.testing.assert_array_equal(out.rank, 1 + np.argmax(order == at[:, None], axis=-1))
    assert (np.asarray(out.rank) > 1).any()
    np.testing.assert_array_equal(out.top_ids, order[:, :MAX_LOGPROBS])
    np.testing.assert_allclose(
        out.top_logprobs, np.take_along_axis(expected, order[:, :MAX_LOGPROBS], -1), atol=1e-5
    )


def test_one_row_that_wants_logprobs_changes_no_token() -> None:
    slots, logits = slots_of(N, V), logits_of(N, V)
    wants = [{**want, "num_logprobs": -1} for want in (WANTS * 3)[: N - 1]]
    without = chosen(logits, rows_of([*wants, {}]), slots)
    with_them = chosen(logits, rows_of([*wants, {"num_logprobs": 0}]), slots)
    np.testing.assert_array_equal(without.token_ids, with_them.token_ids)
    assert all((x == 0).all() for x in without[1:])
    assert with_them.rank[-1] == 1


def test_logprobs_of_a_small_vocabulary() -> None:
    logprob, rank, top_ids, top_logprobs = logprobs_of(jnp.log(jnp.array([[0.5, 0.2, 0.3]])), jnp.array([1]))
    np.testing.assert_allclose(logprob, np.log([0.2]), rtol=1e-5)
    assert (rank.tolist(), top_ids[0, :3].tolist()) == ([3], [0, 2, 1])
    np.testing.assert_allclose(top_logprobs[0, :4], [*np.log([0.5, 0.3, 0.2]), -np.inf], rtol=1e-5)


def test_a_vocabulary_spread_over_devices_gives_the_same_tokens() -> None:
    slots, rows = slots_of(N, V), rows_of((WANTS * 3)[:N])
    logits = logits_of(N, V).at[3, 700].set(jnp.nan)
    mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
    spread = jax.device_put(logits, NamedSharding(mesh, P(None, "tp")))
    everywhere = jax.device_put((rows, slots), NamedSharding(mesh, P()))
    chosen_there = jax.jit(partial(choose, num_shards=4))  # 288 tokens each: no whole blocks
    here, there = chosen(logits, rows, slots), chosen_there(spread, *everywhere)
    assert here.token_ids[3] == -1
    np.testing.assert_array_equal(here.token_ids, there.token_ids)
    np.testing.assert_array_equal(here.rank, there.rank)
    np.testing.assert_array_equal(here.top_ids, there.top_ids)
    greedy = rows_of([{}] * N)
    np.testing.assert_array_equal(
        chosen(logits, greedy, slots).token_ids,
        chosen_there(spread, jax.device_put(greedy, NamedSharding(mesh, P())), everywhere[1]).token_ids,
    )


@pytest.mark.parametrize("vocab", [96, 288])
def test_draws_do_not_depend_on_how_many_devices_the_vocabulary_is_divided_over(vocab: int) -> None:
    draws = 30 * vocab
    logits, rows = jnp.zeros((draws, vocab)), rows_of([{"temperature": 1.0}] * draws)
    draw = jax.jit(partial(tokens, variant=Features.RANDOM), static_argnames="num_shards")
    expected = draw(logits, rows, num_shards=1)
    assert len(np.unique(expected)) == vocab, "those at the ends of shards too"
    for num_shards in (2, 16):
        np.testing.assert_array_equal(draw(logits, rows, num_shards=num_shards), expected)


def test_what_devices_exchange_for_a_random_token() -> None:
    """Of each row no more than the block that holds it: never the parts of rows that lie on a device."""
    num_rows, vocab = 4, 62 * BLOCK  # blocks that do not divide over 4
    layout, mesh = SlotLayout(num_rows + 1, 64, vocab, table_width=4), make_mesh(4)
    unused: Any = None
    spec: Any = SimpleNamespace(vocab_size=vocab)
    context = programs.ProgramContext(spec, mesh, layout, num_rows, unused, unused)
    everywhere = NamedSharding(mesh, P())
    slots: Any = jax.ShapeDtypeStruct((layout.num_slots, layout.width), jnp.int32, sharding=everywhere)
    key = programs.Choose(num_rows, Features.RANDOM)
    function, arguments, *_ = programs.described(key, context, unused, [], slots, {})
    hlo = jax.jit(function).lower(*arguments).compile().as_text()
    exchanged = re.findall(r"= (.*) (?:all-(?:gather|reduce|to-all)|collective-permute)(?:-start)?\(", hlo)
    assert exchanged
    for shapes in exchanged:
        for shape in re.findall(r"\[([\d,]*)\]", shapes):
            assert math.prod(int(n) for n in shape.split(",") if n) <= num_rows * BLOCK, shapes


def test_the_largest_by_passes_are_those_of_a_sort() -> None:
    logits = np.random.default_rng(3).integers(-9, 9, (N, V)).astype(np.float32)  # many are equal
    logits[1, 5:] = -np.inf
    logits[2, 7] = np.inf
    by_sort = jax.lax.top_k(logits, MAX_LOGPROBS)
    by_passes = jax.jit(partial(sampling.largest_by_passes, num=MAX_LOGPROBS))(logits)
    np.testing.assert_array_equal(by_passes[0], by_sort[0])
    np.testing.assert_array_equal(by_passes[1], by_sort[1])
