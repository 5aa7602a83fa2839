"""The sampler against transformers' own processors, and against numpy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from hex_llm.execution import sampling
from hex_llm.execution.sampling import (
    VARIANTS,
    Cutoff,
    Features,
    SamplingRows,
    adjusted,
    tokens,
    variant_of,
    wanted_features,
    weights,
)
from tests.execution.sampled import OFF, N, Slots, V, chosen, logits_of, rows_of, slots_of


@jax.jit
def distribution(logits: jax.Array, rows: SamplingRows, slots: Slots) -> jax.Array:
    """The probabilities that `choose` draws from."""
    parts = weights(adjusted(logits, rows, slots, branches=True), rows, variant=None)
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
    ("want", "variant", "wants"),
    [
        (Features(0), Features(0), [{}, {"top_k": 3, "top_p": 0.5}]),
        (
            Features.RANDOM,
            VARIANTS[1],
            [{}, {"temperature": 0.7}, {"temperature": 1.0, "min_p": 0.2}],
        ),
        (
            VARIANTS[2],
            VARIANTS[2],
            [{}, {"temperature": 1.0, "top_k": 4}, {"temperature": 0.7, "top_p": 0.6}],
        ),
        (
            Features.RANDOM | Features.TYPICAL,
            VARIANTS[3],
            [{"temperature": 1.0, "typical_p": 0.5}, {}],
        ),
        (
            Features.ADJUSTED,
            Features(0),
            [{"presence_penalty": 0.5}, {"repetition_penalty": 1.3}, {}],
        ),
        (
            Features.ADJUSTED | Features.RANDOM,
            VARIANTS[1],
            [{"constrained": 3}, {"temperature": 1.0}],
        ),
        (Features.LOGPROBS, Features(0), [{"num_logprobs": 0}]),
    ],
)
def test_what_is_left_out_was_not_wanted(
    want: Features, variant: Features, wants: list[dict[str, Any]]
) -> None:
    wants = [{"num_tokens": i + 3, **want} for i in range(20) for want in wants]
    rows, slots, logits = rows_of(wants), slots_of(len(wants), 900), logits_of(len(wants), 900)
    logits = logits.at[5, 7].set(jnp.nan)
    assert wanted_features(jax.tree.map(np.asarray, rows)) == want
    assert variant_of(want) == variant
    whole = chosen(logits, rows, slots)
    if Features.ADJUSTED in want:
        logits = jax.jit(partial(adjusted, branches=False))(logits, rows, slots)
    np.testing.assert_array_equal(jax.jit(partial(tokens, variant=variant))(logits, rows), whole.token_ids)
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
        border = Cutoff(
            jnp.asarray(distance[some]), jnp.asarray(values[some], jnp.int32), jnp.asarray(target[some])
        )
        for search in (sampling.threshold_of_nearest, sampling.threshold_by_bisection):
            np.testing.assert_array_equal(jax.jit(search)(border), np.array(expected)[some])


@pytest.mark.parametrize(
    "want",
    [
        {"temperature": 1.0},
        pytest.param({"temperature": 1.7, "top_k": 12}, marks=pytest.mark.slow),
        pytest.param({"temperature": 1.0, "top_p": 0.8, "min_p": 0.02}, marks=pytest.mark.slow),
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
        adjusted(logits, rows_of(wants), slots, branches=True),
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
        parts = np.asarray(sampling.random_part(rows_of([{}] * len(totals)), jnp.asarray(totals)))
        exact = totals.astype(object) * bits >> 32
        assert all(0 <= part <= e <= part + 2 for part, e in zip(parts.tolist(), exact, strict=True))
