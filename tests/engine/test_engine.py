"""The engine on a tiny model: every way of choosing tokens acts, rows are independent, every request ends."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hex_llm.engine import book
from hex_llm.engine.book import NO_TOKEN
from hex_llm.engine.engine import LATE, LEAD_S, Engine, Stepper
from hex_llm.errors import InvalidRequest, QueueFull
from hex_llm.execution import programs
from hex_llm.execution.batch import StepShape
from hex_llm.execution.programs import AddLogprobs, Adjust, Choose, Logits, Write
from hex_llm.execution.sampling import VARIANTS
from hex_llm.sampling_params import SamplingParams, StructuredOutputs
from hex_llm.text.grammar import Budget
from hex_llm.types import FinishReason, Request, Update
from tests.engine.driving import LLAMA, drive, fresh_engine, make_engine, request, tokens
from tests.tiny import greedy_tokens

PROMPT = LLAMA.prompt()
FLAGS: dict[str, Any] = {
    "max_logprobs": -1,
    "max_decode_seqs": 32,
    "decode_seqs_padding": 32,
    "max_model_len": 128,
}


@pytest.fixture(scope="module")
def judge() -> Any:
    return LLAMA.build()


@pytest.fixture(scope="module")
def shared(folder: Path) -> Engine:
    return make_engine(folder, **FLAGS)


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    assert not shared.has_work
    shared.check()


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True, **changes})


def one(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT, **more: Any) -> list[Update]:
    return drive(engine, [request("one", prompt, params, **more)])["one", 0]


def logits_of(judge: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return judge(torch.tensor([ids])).logits[0]


def test_greedy_tokens_are_the_judges(engine: Engine, judge: Any) -> None:
    assert tokens(one(engine, greedy())) == greedy_tokens(judge, PROMPT, 12)


@pytest.mark.slow
def test_programs_that_leave_out_what_is_not_wanted_choose_the_same(engine: Engine, folder: Path) -> None:
    params = [
        {"temperature": 0},
        {},
        {"top_p": 0.8, "top_k": 20},
        {"logprobs": 2},
        {"frequency_penalty": 1.0},
        {"typical_p": 0.7, "logit_bias": {5: 3.0}, "logprobs": 0},
    ]
    several = make_engine(folder, **FLAGS)
    several.stepper.runner.branches = False  # as on GPUs

    def found(engine: Engine, batch: list[dict[str, Any]]) -> list[list[int]]:
        requests = [
            request(str(i), LLAMA.prompt(i), SamplingParams(**{"seed": i, "max_tokens": 6 + i, **one}))
            for i, one in enumerate(batch)
        ]
        ended = drive(engine, requests)
        return [tokens(ended[str(i), 0]) for i in range(len(batch))]

    for batch in (*([one] for one in params), params):
        assert found(several, batch) == found(engine, batch)
    used = {key.variant if isinstance(key, Choose) else type(key) for key in several.stepper.runner.compiled}
    assert used == {*VARIANTS, Adjust, AddLogprobs, Logits, StepShape, Write}


def test_a_seed_gives_the_same_alone_and_among_31_neighbours(engine: Engine) -> None:
    seeded = SamplingParams(seed=1234, max_tokens=20, top_p=0.9, top_k=50, ignore_eos=True)
    alone = tokens(one(engine, seeded))
    assert alone != tokens(one(engine, SamplingParams(seed=1235, max_tokens=20, top_p=0.9, ignore_eos=True)))
    generator = random.Random(0)
    neighbours = [
        request(
            f"n{i}",
            LLAMA.prompt(i)[: generator.randrange(1, 24)],
            SamplingParams(
                temperature=generator.choice([0, 0.5, 1, 3]),
                top_p=generator.choice([0.1, 0.9, 1]),
                top_k=generator.choice([0, 1, 5]),
                min_p=generator.choice([0, 0.2]),
                typical_p=generator.choice([0.3, 1]),
                presence_penalty=generator.choice([0, 1.5]),
                repetition_penalty=generator.choice([1, 1.7]),
                logit_bias=generator.choice([None, {5: 50, 6: -100}]),
                logprobs=generator.choice([None, 3]),
                min_tokens=generator.choice([0, 3]),
                max_tokens=generator.randrange(3, 40),
            ),
        )
        for i in range(31)
    ]
    for position in (0, 15, 31):
        batch = [*neighbours[:position], request("one", PROMPT, seeded), *neighbours[position:]]
        assert tokens(drive(engine, batch)["one", 0]) == alone


def test_without_a_seed_answers_differ_and_follow_from_the_servers(folder: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def answers(seed: int) -> list[list[int]]:
        fresh = make_engine(folder, **FLAGS, seed=seed)
        told = drive(fresh, [request(str(i), PROMPT, params) for i in range(3)])
        return [tokens(told[str(i), 0]) for i in range(3)]

    first = answers(0)
    assert len({tuple(ids) for ids in first}) == 3
    assert answers(0) == first
    assert answers(1) != first


def test_log_probabilities_are_the_judges(engine: Engine, judge: Any) -> None:
    updates = one(engine, greedy(logprobs=5, prompt_logprobs=3, max_tokens=6))
    expected = torch.log_softmax(logits_of(judge, PROMPT + tokens(updates)), -1)
    for i, update in enumerate(updates):
        row = expected[len(PROMPT) + i - 1]
        [found] = update.logprobs
        assert found.rank == 1
        np.testing.assert_allclose(found.logprob, row[update.token_ids[0]], atol=1e-4)
        np.testing.assert_allclose(found.top_logprobs, row.topk(5).values, atol=1e-4)
        assert found.top_ids == row.topk(5).indices.tolist()
    prompt = updates[0].prompt_logprobs
    assert len(prompt) == len(PROMPT) - 1
    for i, found in enumerate(prompt):
        row = expected[i]
        np.testing.assert_allclose(found.logprob, row[PROMPT[i + 1]], atol=1e-4)
        assert found.rank == 1 + int((row > row[PROMPT[i + 1]]).sum())
        assert found.top_ids == row.topk(3).indices.tolist()
    assert not any(update.prompt_logprobs for update in updates[1:])


def test_log_probabilities_of_given_tokens_and_of_all(engine: Engine, judge: Any) -> None:
    size = engine.limits.vocab_size
    given, others = (5, 100, 7), request("other", LLAMA.prompt(1), greedy(max_tokens=4))
    every = request("all", PROMPT, greedy(max_tokens=3, logprobs=size, prompt_logprobs=size))
    labelled = request("given", PROMPT, greedy(max_tokens=3, logprob_token_ids=given))
    told = drive(engine, [others, every, labelled])
    expected = torch.log_softmax(logits_of(judge, PROMPT + tokens(told["all", 0])), -1)
    for i, (of_all, of_given) in enumerate(zip(told["all", 0], told["given", 0], strict=True)):
        row, [whole], [part] = expected[len(PROMPT) + i - 1], of_all.logprobs, of_given.logprobs
        assert sorted(whole.top_ids) == list(range(size))
        np.testing.assert_allclose(whole.top_logprobs, row[whole.top_ids], atol=1e-4)
        assert (part.top_ids, part.rank) == (list(given), 1)
        np.testing.assert_allclose(part.top_logprobs, row[list(given)], atol=1e-4)
        np.testing.assert_allclose([whole.logprob, part.logprob], row[of_all.token_ids * 2], atol=1e-4)
    for i, found in enumerate(told["all", 0][0].prompt_logprobs):
        assert found.rank == 1 + int((expected[i] > expected[i][PROMPT[i + 1]]).sum())
        np.testing.assert_allclose(found.top_logprobs, expected[i][found.top_ids], atol=1e-4)


def test_prompt_log_probabilities_do_not_depend_on_chunks(folder: Path, engine: Engine) -> None:
    chunked = make_engine(folder, **FLAGS, enable_chunked_prefill=True, max_num_batched_tokens=33)
    params = greedy(prompt_logprobs=2)
    prompt = (LLAMA.prompt() * 5)[:100]
    batch = [request(str(i), LLAMA.prompt(i), greedy()) for i in range(4)]
    found = drive(chunked, [*batch, request("one", prompt, params)])["one", 0][0].prompt_logprobs
    expected = one(engine, params, prompt)[0].prompt_logprobs
    assert len(found) == 99
    assert [f.top_ids for f in found] == [e.top_ids for e in expected]
    np.testing.assert_allclose([f.logprob for f in found], [e.logprob for e in expected], atol=1e-5)


def test_penalties_are_the_judges(engine: Engine, judge: Any) -> None:
    ids = torch.tensor([PROMPT])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    expected = judge.generate(ids, max_new_tokens=12, repetition_penalty=1.8, **options)
    assert tokens(one(engine, greedy(repetition_penalty=1.8))) == expected[0, len(PROMPT) :].tolist()
    chosen = tokens(one(engine, greedy(frequency_penalty=2.0, presence_penalty=2.0, max_tokens=30)))
    ids_so_far = list(PROMPT)
    for token_id in chosen:
        scores = logits_of(judge, ids_so_far)[-1].clone()
        for made in set(ids_so_far[len(PROMPT) :]):
            scores[made] -= 2.0 * ids_so_far[len(PROMPT) :].count(made) + 2.0
        assert int(scores.argmax()) == token_id
        ids_so_far.append(token_id)


def test_bias_and_allowed_tokens(engine: Engine, judge: Any) -> None:
    assert set(tokens(one(engine, greedy(logit_bias={77: 100})))) == {77}
    allowed = (3, 50, 99)
    chosen = tokens(one(engine, greedy(allowed_token_ids=allowed)))
    assert set(chosen) <= set(allowed)
    first = logits_of(judge, PROMPT)[-1][list(allowed)]
    assert chosen[0] == allowed[int(first.argmax())]
    best = int(logits_of(judge, PROMPT)[-1].argmax())
    assert tokens(one(engine, greedy(logit_bias={best: -100})))[0] != best


def test_stops(engine: Engine, judge: Any) -> None:
    expected = greedy_tokens(judge, PROMPT, 12)
    stop = expected[4]
    place = expected.index(stop)
    updates = one(engine, greedy(stop_token_ids=(stop,)))
    assert tokens(updates) == expected[: place + 1]
    assert (updates[-1].finish_reason, updates[-1].stop_token_id) == (FinishReason.STOP, stop)
    later = tokens(one(engine, greedy(stop_token_ids=(stop,), min_tokens=place + 2)))
    assert len(later) >= place + 2
    assert stop not in later[: place + 2], "it may not come before, so that it does not end the output"
    one_later = one(engine, greedy(max_tokens=3))
    assert one_later[-1].finish_reason is FinishReason.LENGTH


def test_bad_words(engine: Engine, judge: Any) -> None:
    expected = greedy_tokens(judge, PROMPT, 12)
    single = one(engine, greedy(), bad_word_ids=[[expected[0]]])
    assert expected[0] not in tokens(single)
    pair = expected[2:4]
    chosen = tokens(one(engine, greedy(), bad_word_ids=[pair]))
    assert chosen[:3] == expected[:3]
    assert pair not in [chosen[i : i + 2] for i in range(11)]


def test_several_choices(engine: Engine) -> None:
    params = SamplingParams(n=3, best_of=5, seed=7, max_tokens=6, ignore_eos=True)
    told = drive(engine, [request("r", PROMPT, params)])
    assert set(told) == {("r", i) for i in range(5)}
    assert len({tuple(tokens(updates)) for updates in told.values()}) == 5
    alone = one(engine, SamplingParams(seed=7, max_tokens=6, ignore_eos=True))
    assert tokens(told["r", 0]) == tokens(alone), "the first choice is the one of n=1"


def test_an_answer_without_a_finite_score_ends_that_request_only(
    folder: Path, judge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in one row's logits: its request ends with an error, the others' tokens do not change."""
    plain = programs.forward

    def poisoned(*args: Any, **options: Any) -> Any:
        last, rows, *rest = plain(*args, **options)
        bad = rows[2] == len(PROMPT) + 3  # whoever has so many tokens
        return jnp.where(bad[: len(last), None], jnp.nan, last), rows, *rest

    monkeypatch.setattr(programs, "forward", poisoned)
    engine = make_engine(folder, **FLAGS)
    others = [LLAMA.prompt(i)[: 10 - i] for i in range(5)]
    requests = [request(f"other{i}", prompt, greedy(max_tokens=8)) for i, prompt in enumerate(others)]
    told = drive(engine, [request("bad", PROMPT, greedy()), *requests])
    bad = told["bad", 0]
    assert (len(tokens(bad)), bad[-1].finish_reason, bad[-1].error) == (3, FinishReason.ERROR, NO_TOKEN)
    assert bad[-1].param is None, "the request is not at fault"
    for i, prompt in enumerate(others):
        assert tokens(told[f"other{i}", 0]) == greedy_tokens(judge, prompt, 8)
    assert engine.book.ledger == {"accepted": 6, "finished": 5, "error": 1}


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("r", PROMPT, greedy(allowed_token_ids=(5,)), bad_word_ids=[[5, 5]]), "allowed_token_ids"),
        (
            request(
                "r", PROMPT, bad_word_ids=[[5, i] for i in range(128)] + [[i] for i in range(128) if i != 5]
            ),
            "bad_words",
        ),
    ],
)
def test_whoever_forbids_all_tokens_on_the_way_is_at_fault(engine: Engine, bad: Request, param: str) -> None:
    told = drive(engine, [bad])["r", 0]
    assert (tokens(told), told[-1].finish_reason, told[-1].param) == ([5], FinishReason.ERROR, param)


class Grammar:
    """Allows everything; following it fails after two tokens, through the request's fault or another's."""

    stopped = False
    budget = Budget()

    def __init__(self, error: Exception | None) -> None:
        self.error, self.num_left = error, 2

    def submit(self, _: StructuredOutputs) -> Future[Grammar]:
        made: Future[Grammar] = Future()
        made.set_result(self)
        return made

    def copy(self) -> Grammar:
        return self

    def mask(self) -> np.ndarray:
        return np.full(4, -1, np.int32)

    def accept(self, _: int) -> bool:
        self.num_left -= 1
        if self.error is not None and not self.num_left:
            raise self.error
        return self.num_left > 0


@pytest.mark.parametrize(
    ("error", "message", "param"),
    [
        (InvalidRequest("too complex", "structured_outputs"), "too complex", "structured_outputs"),
        (RuntimeError("lost"), "lost", None),
        (None, "does not follow the grammar", None),
    ],
)
def test_a_grammar_that_cannot_be_followed_ends_its_request_and_says_who_is_at_fault(
    folder: Path, judge: Any, error: Exception | None, message: str, param: str | None
) -> None:
    engine = make_engine(folder, Grammar(error), **FLAGS)
    structured = greedy(structured_outputs=StructuredOutputs(json_object=True))
    told = drive(engine, [request("bad", PROMPT, structured), request("good", PROMPT, greedy())])
    end = told["bad", 0][-1]
    assert (len(tokens(told["bad", 0])), end.finish_reason, end.param) == (2, FinishReason.ERROR, param)
    assert message in end.error
    assert tokens(told["good", 0]) == greedy_tokens(judge, PROMPT, 12)


def test_one_book_feeds_several_runners(engine: Engine, folder: Path, judge: Any) -> None:
    steppers = [engine.stepper, make_engine(folder, **FLAGS).stepper]
    requests, updates = book.RequestBook(engine.spec, engine.limits), list[Update]()
    prompts = [LLAMA.prompt(i) for i in range(4)]
    for i, prompt in enumerate(prompts):
        requests.add(request(str(i), prompt, greedy()), steppers[i % 2].scheduler)
    before = [stepper.num_steps for stepper in steppers]
    while requests.has_work or any(stepper.is_in_flight for stepper in steppers):
        for stepper in steppers:
            stepper.step(requests)
        updates += requests.take_updates()
    for i, prompt in enumerate(prompts):
        assert tokens([u for u in updates if u.request_id == str(i)]) == greedy_tokens(judge, prompt, 12)
    assert [stepper.num_steps - n for stepper, n in zip(steppers, before, strict=True)] == [12, 12]
    requests.check_idle()
    for stepper in steppers:
        stepper.scheduler.check_idle()


@pytest.mark.parametrize("moment", range(9))
def test_abort_at_any_moment(engine: Engine, judge: Any, moment: int) -> None:
    def between(step: int) -> None:
        if step == moment:
            engine.abort("gone")
            engine.abort("gone")
            engine.abort("never was")

    before = dict(engine.book.ledger)
    gone = request("gone", LLAMA.prompt(3), greedy(max_tokens=8, n=2))
    told = drive(engine, [request("stays", PROMPT, greedy()), gone], between)
    assert tokens(told["stays", 0]) == greedy_tokens(judge, PROMPT, 12)
    reasons = {told["gone", i][-1].finish_reason for i in range(2)}
    assert reasons == {FinishReason.ABORT}
    assert engine.book.ledger["aborted"] == before.get("aborted", 0) + 1


def test_a_stop_string_found_outside_ends_one_choice(engine: Engine) -> None:
    def between(step: int) -> None:
        if step == 5:
            engine.stop("r", 1)
            engine.stop("r", 99)

    told = drive(engine, [request("r", PROMPT, greedy(n=2))], between)
    assert told["r", 1][-1].finish_reason is FinishReason.STOP
    assert len(tokens(told["r", 1])) < len(tokens(told["r", 0])) == 12


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request("", PROMPT), "request_id"),
        (request("r", []), "prompt"),
        (request("r", [128]), "prompt"),
        (request("r", [1] * 128), "prompt"),
        (request("r", PROMPT, greedy(stop_token_ids=(128,))), "stop_token_ids"),
        (request("r", PROMPT, greedy(allowed_token_ids=(1, 128))), "allowed_token_ids"),
        (request("r", PROMPT, greedy(logit_bias={128: 1.0})), "logit_bias"),
        (request("r", PROMPT, bad_word_ids=[[1, 128]]), "bad_words"),
        (request("r", PROMPT, bad_word_ids=[[]]), "bad_words"),
        (request("r", PROMPT, greedy(max_tokens=None, min_tokens=2**31 - 1)), "min_tokens"),
        (request("r", PROMPT, priority=2**31), "priority"),
        (request("r", PROMPT, priority=True), "priority"),
        (request("r", PROMPT, cache_salt="x" * 5000), "cache_salt"),
        (request("r", PROMPT, cache_salt=3), "cache_salt"),
        (request("r", PROMPT, cache_salt="\ud800"), "cache_salt"),
        (
            request("r", PROMPT, greedy(allowed_token_ids=(2,), ignore_eos=False, min_tokens=1)),
            "allowed_token_ids",
        ),
    ],
)
def test_what_could_harm_is_refused_before_anything_is_allocated(
    engine: Engine, bad: Request, param: str
) -> None:
    before = engine.book.ledger.copy()
    with pytest.raises(InvalidRequest) as refused:
        engine.add(bad)
    assert refused.value.param == param
    assert engine.book.ledger == before


def test_an_id_in_use_is_refused(engine: Engine) -> None:
    engine.add(request("r", PROMPT))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add(request("r", PROMPT))
    drive(engine)


def test_what_fails_while_it_is_accepted_was_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, left = book.Sequence, [2]

    def fails(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no memory")
        return plain(*args, **named)

    before = engine.book.ledger.copy()
    with monkeypatch.context() as patched:
        patched.setattr(book, "Sequence", fails)
        with pytest.raises(RuntimeError):
            engine.add(request("r", PROMPT, greedy(n=4)))  # of which the third fails
    assert not engine.has_work
    assert engine.book.ledger == before
    engine.check()
    drive(engine, [request("r", PROMPT)])


def test_the_queue_has_an_end(folder: Path) -> None:
    engine = make_engine(folder, **FLAGS, max_concurrent_requests=5)
    engine.add(request("a", PROMPT, greedy(n=4)))
    with pytest.raises(QueueFull, match=r"4 sequences .* no more than 5"):
        engine.add(request("b", PROMPT, greedy(n=2)))
    engine.add(request("c", PROMPT))
    drive(engine)
    assert engine.book.ledger == {"accepted": 2, "finished": 2}


def test_the_next_step_is_scheduled_shortly_before_one_with_prompts_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less of a forecast is believed, the oftener that was too late."""
    engine = fresh_engine(engine)
    assert isinstance(engine.stepper, Stepper)
    patience = []
    for _ in range(5):
        engine.stepper.note_times({1: 10.0, 1000: 10.0})
        engine.add(request("r", PROMPT, greedy(max_tokens=2)))
        engine.step()
        with monkeypatch.context() as patched:
            patched.setattr(Stepper, "can_read", False)
            patience.append(engine.patience_s)
        while not engine.stepper.can_read:
            time.sleep(0.01)
        assert engine.patience_s == 0, "it has ended"
        engine.step()
        assert engine.patience_s == 0, "a decode"
        drive(engine)
        assert engine.patience_s == 0
    assert patience == pytest.approx([10 * LATE**i - LEAD_S for i in range(5)], abs=0.2)


def test_priority(folder: Path) -> None:
    engine = make_engine(folder, **{**FLAGS, "max_decode_seqs": 1}, allow_priority=True)
    order: list[str] = []
    for name, priority in (("a", 0), ("b", 1), ("c", -1)):
        engine.add(request(name, PROMPT, greedy(max_tokens=2), priority=priority))
    while engine.has_work:
        order += [u.request_id for u in engine.step() if u.finish_reason]
    assert order == ["c", "a", "b"]


def test_priority_only_where_it_is_allowed(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="--allow_priority") as refused:
        engine.add(request("r", PROMPT, priority=-1))
    assert refused.value.param == "priority"
    drive(engine, [request("r", PROMPT, priority=0)])
