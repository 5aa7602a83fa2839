"""The sampler against transformers' own processors, against numpy, and against itself in other company."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from transformers.generation import logits_process as hf

from hex_llm.engine import sampling
from hex_llm.engine.sampling import (
    Border,
    Chosen,
    SamplingRows,
    Wants,
    adjusted,
    choose,
    logprobs_of,
    wanted,
    weights,
)
from hex_llm.sampling_params import MAX_LOGPROBS

OFF = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "num_prompt": 3,
    "num_tokens": 7,
    "num_logprobs": -1,
    "constrained": 0,
}
N, V = 32, 1152  # shared by tests, as each shape takes seconds to compile
WANTS = [  # one of each kind
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.6},
    {"repetition_penalty": 1.7},
    {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": -0.4},
    {"constrained": 1, "temperature": 1.0},
    {"constrained": 2},
    {"num_logprobs": 4},
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    ids: jax.Array
    words: jax.Array
    biased: tuple[jax.Array, jax.Array]

    def history(self) -> jax.Array:
        return self.ids

    def allowed(self) -> jax.Array:
        return self.words

    def bias(self) -> tuple[jax.Array, jax.Array]:
        return self.biased


def rows_of(wants: list[dict[str, Any]], seeds: Any = None) -> SamplingRows:
    columns = {
        name: np.array(
            [want.get(name, off) for want in wants], np.float32 if isinstance(off, float) else np.int32
        )
        for name, off in OFF.items()
    }
    seeds = np.arange(len(wants)) if seeds is None else np.asarray(seeds)
    seed = np.stack([seeds * 7919, seeds + 17], axis=-1).astype(np.int32)
    return jax.tree.map(jnp.asarray, SamplingRows(seed=seed, **columns))


def slots_of(num_rows: int, vocab: int, seed: int = 0, length: int = 12) -> Slots:
    random = np.random.default_rng(seed)
    words = random.integers(-(2**31), 2**31, (num_rows, -(-vocab // 32)))
    bias_ids = np.stack([random.permutation(vocab)[:4] for _ in range(num_rows)])
    history = random.integers(0, vocab, (num_rows, length))
    history[:, 1] = bias_ids[:, 0]  # biased and penalized: the order matters
    bias_ids[:, 2] = -1
    return Slots(
        jnp.asarray(history, jnp.int32),
        jnp.asarray(words.astype(np.int32)),
        (jnp.asarray(bias_ids, jnp.int32), jnp.asarray(random.normal(0, 3, (num_rows, 4)), jnp.float32)),
    )


def logits_of(num_rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed + 100).normal(0, spread, (num_rows, vocab)), jnp.float32)


chosen = jax.jit(choose)


@jax.jit
def distribution(logits: jax.Array, rows: SamplingRows, slots: Slots) -> jax.Array:
    """The probabilities that `choose` draws from."""
    parts = weights(adjusted(logits, rows, slots), rows)
    return parts / parts.sum(axis=-1, keepdims=True)


def judged(logits: jax.Array, want: dict[str, Any], slots: Slots, row: int) -> np.ndarray[Any, Any]:
    """transformers' probabilities of one row."""
    want = {**OFF, **want}
    scores = torch.tensor(np.asarray(logits[row : row + 1]))
    history = torch.tensor(np.asarray(slots.ids[row : row + 1, : want["num_tokens"]])).long()
    if want["constrained"] & 2:
        pairs = zip(*(np.asarray(x[row]).tolist() for x in slots.biased), strict=True)
        scores = hf.SequenceBiasLogitsProcessor([[[i], v] for i, v in pairs if i >= 0])(history, scores)
    if want["repetition_penalty"] != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(want["repetition_penalty"])(history, scores)
    counts = torch.bincount(history[0, want["num_prompt"] :], minlength=scores.shape[-1])
    scores = scores - want["frequency_penalty"] * counts - want["presence_penalty"] * (counts > 0)
    if want["constrained"] & 1:
        scores = scores.masked_fill(~torch.tensor(allowed_of(slots, row, scores.shape[-1])), -math.inf)
    warpers = [hf.TemperatureLogitsWarper(want["temperature"])]
    if want["top_k"] > 0:
        warpers.append(hf.TopKLogitsWarper(want["top_k"]))
    if want["top_p"] < 1:
        warpers.append(hf.TopPLogitsWarper(want["top_p"]))
    warpers.append(hf.MinPLogitsWarper(want["min_p"]))
    if want["typical_p"] < 1:
        warpers.append(hf.TypicalLogitsWarper(want["typical_p"]))
    for warper in warpers:
        scores = warper(history, scores)
    return scores.softmax(dim=-1)[0].numpy()


def allowed_of(slots: Slots, row: int, vocab: int) -> np.ndarray[Any, Any]:
    words = np.asarray(slots.words[row]).view(np.uint32)
    return np.array([bool(words[i // 32] >> (i % 32) & 1) for i in range(vocab)])


def assert_as_judged(logits: jax.Array, wants: list[dict[str, Any]], slots: Slots) -> None:
    ours = np.asarray(distribution(logits, rows_of(wants), slots))
    for row, want in enumerate(wants):
        theirs = judged(logits, want, slots, row)
        # What is less likely than one part in 2**30 has no part.
        differs = (ours[row] > 0) != (theirs > 0)
        assert (theirs[differs] < 2.0**-29).all(), (want, np.flatnonzero(differs))
        np.testing.assert_allclose(ours[row], theirs, atol=1e-5, err_msg=str(want))


ALONE = (
    [{"temperature": t} for t in (0.1, 0.5, 1.0, 2.0, 100.0)]
    + [{"temperature": 1.0, "top_k": k} for k in (1, 2, 17, 1000, 5000)]
    + [{"temperature": 1.0, "top_p": p} for p in (1e-6, 0.1, 0.5, 0.9, 0.999)]
    + [{"temperature": 1.0, "min_p": p} for p in (0.001, 0.05, 0.5, 1.0)]
    + [{"temperature": 1.0, "typical_p": p} for p in (1e-6, 0.2, 0.5, 0.9, 0.99)]
    + [{"temperature": 1.0, "repetition_penalty": p} for p in (0.5, 1.2, 100.0)]
    + [{"temperature": 1.0, "presence_penalty": p} for p in (-2.0, 1.5)]
    + [{"temperature": 1.0, "frequency_penalty": p} for p in (-2.0, 1.5)]
    + [{"temperature": 1.0, "constrained": bits} for bits in (1, 2, 3)]
)


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("vocab", [77, 800])
def test_each_parameter_alone_gives_transformers_distribution(vocab: int, spread: float) -> None:
    slots = slots_of(len(ALONE), vocab)
    assert_as_judged(logits_of(len(ALONE), vocab, spread=spread), ALONE, slots)


@pytest.mark.parametrize("seed", range(4))
def test_parameters_together_give_transformers_distribution(seed: int) -> None:
    random = np.random.default_rng(seed)
    wants = []
    for _ in range(64):
        want = {
            "temperature": random.choice([0.3, 0.7, 1.0, 1.5]),
            "top_k": int(random.choice([3, 20, 100, 700])),
            "top_p": random.choice([0.3, 0.6, 0.9, 0.98]),
            "min_p": random.choice([0.001, 0.02, 0.2]),
            "typical_p": random.choice([0.3, 0.7, 0.95]),
            "repetition_penalty": random.choice([0.8, 1.3]),
            "presence_penalty": random.choice([-1.0, 0.7]),
            "frequency_penalty": random.choice([-0.5, 0.6]),
            "constrained": int(random.integers(4)),
        }
        kept = random.random(len(want)) < (1.0 if len(wants) < 16 else 0.6)
        wants.append(
            {"temperature": 1.0, **{k: v for (k, v), keep in zip(want.items(), kept, strict=True) if keep}}
        )
    slots = slots_of(len(wants), 800, seed)
    assert_as_judged(logits_of(len(wants), 800, seed), wants, slots)


@pytest.mark.parametrize(
    ("most", "wants"),
    [
        (Wants.LIKELIEST, [{}, {"top_k": 3, "top_p": 0.5}]),
        (Wants.RANDOM, [{}, {"temperature": 0.7}, {"temperature": 1.0, "min_p": 0.2}]),
        (Wants.CUT, [{}, {"temperature": 1.0, "top_k": 4}, {"temperature": 0.7, "top_p": 0.6}]),
        (Wants.ANYTHING, [{"temperature": 1.0, "typical_p": 0.5}, {}]),
        (Wants.ANYTHING, [{"presence_penalty": 0.5}]),
        (Wants.ANYTHING, [{"num_logprobs": 0}]),
        (Wants.ANYTHING, [{"constrained": 2}]),
    ],
)
def test_what_is_left_out_was_not_wanted(most: Wants, wants: list[dict[str, Any]]) -> None:
    wants = [{"num_tokens": i + 3, **want} for i in range(20) for want in wants]
    rows, slots, logits = rows_of(wants), slots_of(len(wants), 900), logits_of(len(wants), 900)
    logits = logits.at[5, 7].set(jnp.nan)
    assert wanted(jax.tree.map(np.asarray, rows)) is most
    least, whole = jax.jit(partial(choose, most=most))(logits, rows, slots), chosen(logits, rows, slots)
    jax.tree.map(np.testing.assert_array_equal, least, whole)
    assert whole.token_ids[5] == -1


@pytest.mark.parametrize("vocab", [40, 700, 5000])
def test_both_searches_for_a_border_agree(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    distance = random.normal(0, 5, (16, vocab)).astype(np.float32)
    distance[3] = np.round(distance[3])  # ties, and both zeros
    distance[4] = 0.0
    distance[5, ::3] = np.inf
    distance[6] = -np.inf
    distance[7] *= np.float32(1e-40)
    values = random.integers(0, 100, (16, vocab))
    share = np.where(np.arange(16) % 2, 0.001, random.random(16))
    target = np.maximum(values.sum(axis=-1) * share, 1).astype(np.int32)
    expected = []
    for row in range(16):
        order = np.argsort(distance[row], kind="stable")
        expected.append(distance[row, order[np.searchsorted(np.cumsum(values[row, order]), target[row])]])
    for some in (slice(0, 16, 2), slice(1, 16, 2)):  # the nearest suffice for all of the second kind
        border = Border(
            jnp.asarray(distance[some]), jnp.asarray(values[some], jnp.int32), jnp.asarray(target[some])
        )
        for search in (sampling._radius_of_nearest, sampling._radius_by_bisection):
            np.testing.assert_array_equal(jax.jit(search)(border), np.array(expected)[some])


@pytest.mark.parametrize(
    "want",
    [
        {"temperature": 1.0},
        {"temperature": 1.7, "top_k": 12},
        {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.2, "typical_p": 0.7, "frequency_penalty": 0.5, "constrained": 3},
    ],
)
def test_draws_follow_the_distribution(want: dict[str, Any]) -> None:
    vocab, draws = 150, 50_000
    slots = slots_of(1, vocab)
    logits = logits_of(1, vocab, spread=1.5)
    expected = np.asarray(distribution(logits, rows_of([want]), slots), np.float64)[0] * draws

    rows = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), rows_of([want]))
    rows = rows._replace(seed=rows_of([{}] * draws).seed)
    many = jax.tree.map(lambda x: jnp.repeat(x, draws, axis=0), slots)
    token_ids = np.asarray(chosen(jnp.repeat(logits, draws, axis=0), rows, many).token_ids)
    assert_follows(np.bincount(token_ids, minlength=vocab), expected)


def test_positions_draw_independently() -> None:
    """One seed, many positions: as good as many seeds."""
    vocab, draws = 150, 50_000
    logits = logits_of(1, vocab, spread=1.0)
    expected = np.asarray(jax.nn.softmax(logits), np.float64)[0] * draws
    wants = [{"temperature": 1.0, "num_tokens": n} for n in range(1, draws + 1)]
    rows = rows_of(wants, seeds=np.full(draws, 5))
    token_ids = np.asarray(chosen(jnp.repeat(logits, draws, axis=0), rows, slots_of(draws, vocab)).token_ids)
    assert_follows(np.bincount(token_ids, minlength=vocab), expected)
    pairs = np.bincount(token_ids[:-1:2] % 4 * 4 + token_ids[1::2] % 4, minlength=16)
    quarter = np.array([expected[i::4].sum() for i in range(4)]) / draws
    assert_follows(pairs, np.outer(quarter, quarter).ravel() * draws / 2)


def assert_follows(observed: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert (observed[expected == 0] == 0).all()
    common = expected >= 5
    assert common.sum() > 3
    groups = [(observed[common], expected[common]), ([observed[~common].sum()], [expected[~common].sum()])]
    terms = np.concatenate([(np.array(o) - e) ** 2 / np.maximum(e, 1e-9) for o, e in groups if np.sum(e) > 0])
    # The upper tail of the chi-square distribution.
    p = torch.special.gammaincc(torch.tensor((len(terms) - 1) / 2.0), torch.tensor(terms.sum() / 2))
    assert p > 0.001


def test_greedy_rows_take_the_best_of_their_adjusted_logits() -> None:
    wants = [
        {},
        {"repetition_penalty": 3.0},
        {"frequency_penalty": 2.0},
        {"constrained": 1},
        {"constrained": 3},
    ] * 7
    wants, slots, logits = wants[:N], slots_of(N, V), logits_of(N, V)
    logits = logits.at[jnp.arange(N), slots.ids[:, 5]].add(8.0)  # what was said is likely
    token_ids = np.asarray(chosen(logits, rows_of(wants), slots).token_ids)
    expected = [
        np.argmax(judged(logits, {**want, "temperature": 1.0}, slots, row)) for row, want in enumerate(wants)
    ]
    assert token_ids.tolist() == expected
    assert (token_ids != np.argmax(logits, axis=-1)).any()


def test_penalties_by_hand() -> None:
    logits = jnp.array([[2.0, -2.0, 1.0, 0.0, -jnp.inf, 4.0]] * 3)
    slots = slots_of(3, 6)
    slots = Slots(jnp.array([[0, 1, 4, 1, 1, 2, 5, 5]] * 3), slots.words, slots.biased)
    wants = [
        {"repetition_penalty": 2.0, "num_prompt": 2, "num_tokens": 6},
        {"frequency_penalty": 0.5, "presence_penalty": 1.0, "num_prompt": 2, "num_tokens": 6},
        {},
    ]
    np.testing.assert_array_equal(
        adjusted(logits, rows_of(wants), slots),
        np.array(
            [
                [1.0, -4.0, 0.5, 0.0, -np.inf, 4.0],  # token 5 lies beyond the history
                [
                    2.0,
                    -4.0,
                    -0.5,
                    0.0,
                    -np.inf,
                    4.0,
                ],  # token 0 is in the prompt only; 1 twice, 2 and 4 once after it
                [2.0, -2.0, 1.0, 0.0, -np.inf, 4.0],
            ],
            np.float32,
        ),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_edges(temperature: float) -> None:
    base = logits_of(1, V)[0]
    best = int(jnp.argmax(base))
    spread = base.at[10].set(1e30).at[11].set(-1e30)
    holes = jnp.where(jnp.arange(V) % 2 == best % 2, base, -jnp.inf)
    only = jnp.full(V, -jnp.inf).at[33].set(-1e30)
    cases = [
        (base, {"top_k": 1}, best),
        (base, {"top_p": 1e-30}, best),
        (base, {"min_p": 1.0}, best),
        (base, {"temperature": 1e-5}, best),
        (base, {"temperature": 1e-30}, best),
        (base, {"temperature": 1e-42}, best),  # not a normal float
        (spread, {"top_p": 0.9, "typical_p": 0.9, "min_p": 0.1}, 10),
        (spread, {"temperature": 100.0}, 10),
        (spread, {"temperature": 1e-5}, 10),
        (spread, {"repetition_penalty": 1e-20}, 10),  # as good as infinite
        (holes, {"top_k": 1, "typical_p": 0.5}, best),
        (only, {"top_k": 40, "top_p": 0.5, "typical_p": 0.5, "min_p": 0.5}, 33),
    ]
    cases += [(base, {"top_k": 1}, best)] * (N - len(cases))
    slots = slots_of(N, V)
    slots = Slots(slots.ids.at[:, 0].set(10), slots.words, slots.biased)
    wants = [{"temperature": temperature, **want} for _, want, _ in cases]
    token_ids = chosen(jnp.stack([x for x, _, _ in cases]), rows_of(wants), slots).token_ids
    for token_id, (_, want, expected) in zip(token_ids.tolist(), cases, strict=True):
        assert token_id == expected, want


def test_equal_logits_stay_together() -> None:
    wants = [
        {"temperature": 1.0, **want}
        for want in ({}, {"top_k": 3}, {"top_p": 0.2}, {"typical_p": 0.2}, {"min_p": 1.0})
    ]
    logits = jnp.full((len(wants), 96), 7.0)
    np.testing.assert_allclose(
        distribution(logits, rows_of(wants), slots_of(len(wants), 96)), 1 / 96, rtol=1e-6
    )


def test_improbable_tokens_are_never_drawn() -> None:
    vocab, draws = 150, 50_000
    logits = jnp.where(jnp.arange(vocab) % 3 == 1, -jnp.inf, jnp.zeros(vocab))
    rows = rows_of([{"temperature": 1.0}] * draws)
    token_ids = chosen(jnp.tile(logits, (draws, 1)), rows, slots_of(draws, vocab)).token_ids
    assert set(np.unique(token_ids)) == {i for i in range(vocab) if i % 3 != 1}


def test_random_parts_lie_inside_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = np.array([1, 2, 2**16, 2**29, 2**30 + 77], np.int32)
    for bits in (0, 1, 2**16 - 1, 2**31, 2**32 - 1):
        monkeypatch.setattr(jax.random, "key_data", lambda key, bits=bits: jnp.array([bits, 0], jnp.uint32))
        parts = np.asarray(sampling._random_part(rows_of([{}] * len(totals)), jnp.asarray(totals)))
        exact = totals.astype(object) * bits >> 32
        assert all(0 <= part <= e <= part + 2 for part, e in zip(parts.tolist(), exact, strict=True))


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
    here, there = chosen(logits, rows, slots), chosen(spread, *everywhere)
    assert here.token_ids[3] == -1
    np.testing.assert_array_equal(here.token_ids, there.token_ids)
    np.testing.assert_array_equal(here.rank, there.rank)
    np.testing.assert_array_equal(here.top_ids, there.top_ids)
    greedy = rows_of([{}] * N)
    np.testing.assert_array_equal(
        chosen(logits, greedy, slots).token_ids,
        chosen(spread, jax.device_put(greedy, NamedSharding(mesh, P())), everywhere[1]).token_ids,
    )


def test_the_largest_by_passes_are_those_of_a_sort() -> None:
    logits = np.random.default_rng(3).integers(-9, 9, (N, V)).astype(np.float32)  # many are equal
    logits[1, 5:] = -np.inf
    logits[2, 7] = np.inf
    by_sort = jax.lax.top_k(logits, MAX_LOGPROBS)
    by_passes = jax.jit(partial(sampling._largest_by_passes, num=MAX_LOGPROBS))(logits)
    np.testing.assert_array_equal(by_passes[0], by_sort[0])
    np.testing.assert_array_equal(by_passes[1], by_sort[1])
