from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from hex_llm.frontend.outputs import OutputCollector, for_engine
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.detokenize import Detokenizer
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import FinishReason, Logprob, Request, TokenLogprobs, Update
from tests.server.fakes import BOS, EOS, FIRST_BYTE, byte_tokenizer, fake_logprobs

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def ids_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


PROMPT = [BOS, *ids_of("ab")]


def collector(
    tokenizer: Tokenizer | None = None, prompt: str | None = None, **params: Any
) -> OutputCollector:
    request = Request("r", PROMPT, SamplingParams(**params))
    return OutputCollector(request, tokenizer, prompt)


def update(token_ids: list[int], finish: FinishReason | None = None, index: int = 0, **more: Any) -> Update:
    return Update("r", index, token_ids, finish_reason=finish, **more)


def test_tokens_become_text() -> None:
    made = collector(byte_tokenizer())
    assert not made.add(update(ids_of("hä")[:2], num_cached=2))
    assert (made.output().outputs[0].text, made.output().finished, made.finished) == ("h", False, False)
    assert not made.add(update(ids_of("hä")[2:]))
    assert not made.add(update(ids_of("!"), LENGTH))
    (output,), request = made.output().outputs, made.output()
    assert (output.text, output.token_ids, output.finish_reason) == ("hä!", ids_of("hä!"), LENGTH)
    assert (output.logprobs, output.cumulative_logprob, output.stop_reason) == (None, None, None)
    assert (request.prompt_token_ids, request.num_cached_tokens, request.finished) == (PROMPT, 2, True)
    assert made.finished


def test_a_last_token_without_text_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads gets an error then, which must be the only end."""
    made = collector(byte_tokenizer())
    made.add(update(ids_of("h")))
    made.deltas()
    monkeypatch.setattr(Detokenizer, "add", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        made.add(update(ids_of("i"), LENGTH))
    assert (made.deltas(), made.finished) == ([], False)


def test_without_a_tokenizer_there_is_no_text() -> None:
    made = collector()
    made.add(update([7, 8], STOP))
    (output,) = made.output().outputs
    assert (output.text, output.token_ids, output.finish_reason) == ("", [7, 8], STOP)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "a"),
        ({"skip_special_tokens": False}, "a"),
        ({"include_stop_str_in_output": True}, "a"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a</s>"),
    ],
)
def test_the_end_token_is_a_token_but_no_text(params: dict[str, Any], text: str) -> None:
    made = collector(byte_tokenizer(), **params)
    made.add(update([*ids_of("a"), EOS], STOP))
    (output,) = made.output().outputs
    assert (output.text, output.token_ids, output.stop_reason) == (text, [*ids_of("a"), EOS], None)


def test_a_stop_token_is_the_reason() -> None:
    made = collector(byte_tokenizer(), stop_token_ids=ids_of("x"))
    made.add(update(ids_of("ax"), STOP, stop_token_id=ids_of("x")[0]))
    (output,) = made.output().outputs
    assert (output.text, output.token_ids, output.stop_reason) == ("a", ids_of("ax"), ids_of("x")[0])


def test_an_end_without_a_token_hides_none() -> None:
    """So do the ends of grammars come."""
    made = collector(byte_tokenizer())
    made.add(update(ids_of("ab")))
    made.add(update([], STOP))
    assert made.output().outputs[0].text == "ab"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("split", range(1, 8))
def test_a_stop_string_ends_a_choice(include: bool, split: int) -> None:
    made = collector(byte_tokenizer(), stop="cd", include_stop_str_in_output=include, logprobs=0)
    ids = ids_of("abcdefg")
    parts = [ids[:split], ids[split:], ids_of("more")]
    told = [made.add(update(part, logprobs=[fake_logprobs(i, 0) for i in part])) for part in parts if part]
    assert told.count(True) == 1, "the engine must be told once"
    assert made.finished
    assert not made.add(update([], STOP)), "the engine's own end comes later and is ignored"
    (output,) = made.output().outputs
    assert output.text == ("abcd" if include else "ab")
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (ids_of("abcd"), STOP, "cd")
    assert output.logprobs is not None
    assert [list(known) for known in output.logprobs] == [[i] for i in ids_of("abcd")]


def test_a_stop_string_with_the_last_token_counts() -> None:
    made = collector(byte_tokenizer(), stop="b")
    assert not made.add(update(ids_of("ab"), LENGTH)), "the engine knows that it has ended"
    (output,) = made.output().outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", STOP, "b")


def test_what_might_have_been_a_stop_string_is_shown_in_the_end() -> None:
    made = collector(byte_tokenizer(), stop="xyz")
    made.add(update(ids_of("axy")))
    assert made.output().outputs[0].text == "a"
    made.add(update([EOS], STOP))
    assert made.output().outputs[0].text == "axy"


def test_nothing_follows_an_end() -> None:
    made = collector(byte_tokenizer())
    made.add(update(ids_of("a"), LENGTH))
    assert not made.add(update(ids_of("b"), FinishReason.ABORT))
    (output,) = made.output().outputs
    assert (output.text, output.token_ids, output.finish_reason) == ("a", ids_of("a"), LENGTH)


def test_errors_are_told() -> None:
    made = collector(byte_tokenizer())
    made.add(update([], FinishReason.ERROR, error="no finite score"))
    (output,) = made.output().outputs
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "no finite score")


# ---- log-probabilities


def test_logprobs_hold_the_chosen_token_and_the_likeliest() -> None:
    made = collector(byte_tokenizer(), logprobs=2)
    a, b, c = ids_of("abc")
    made.add(update([c], logprobs=[TokenLogprobs(-3.0, 9, [a, b], [-0.5, -1.5])]))
    made.add(update([a], LENGTH, logprobs=[TokenLogprobs(-0.5, 1, [a, b], [-0.5, -1.5])]))
    (output,) = made.output().outputs
    assert output.logprobs == [
        {c: Logprob(-3.0, 9, "c"), a: Logprob(-0.5, 1, "a"), b: Logprob(-1.5, 2, "b")},
        {a: Logprob(-0.5, 1, "a"), b: Logprob(-1.5, 2, "b")},
    ]
    assert output.cumulative_logprob == -3.5


def test_prompt_logprobs_begin_with_none() -> None:
    made = collector(byte_tokenizer(), prompt_logprobs=1)
    a, b = ids_of("ab")
    made.add(update([], prompt_logprobs=[TokenLogprobs(-1.0, 2, [b], [-0.1])]))
    made.add(update([a], LENGTH, prompt_logprobs=[TokenLogprobs(-0.2, 1, [b], [-0.2])]))
    output = made.output()
    assert output.prompt_logprobs == [
        None,
        {a: Logprob(-1.0, 2, "a"), b: Logprob(-0.1, 1, "b")},
        {b: Logprob(-0.2, 1, "b")},
    ]
    assert output.outputs[0].logprobs is None


def test_a_token_that_is_part_of_a_character_has_a_name() -> None:
    made = collector(byte_tokenizer(), logprobs=0)
    part = ids_of("ä")[0]
    made.add(update([part], LENGTH, logprobs=[fake_logprobs(part, 0)]))
    (known,) = made.output().outputs[0].logprobs or []
    assert known[part].decoded_token == "\ufffd"


# ---- several choices


def test_choices_are_kept_apart() -> None:
    made = collector(byte_tokenizer(), n=2, stop="z")
    made.add(update(ids_of("a"), index=1))
    made.add(update(ids_of("b"), index=0))
    assert made.add(update(ids_of("z"), index=1))
    assert not made.finished
    made.add(update(ids_of("c"), LENGTH, index=0))
    assert made.finished
    assert [(o.index, o.text, o.finish_reason) for o in made.output().outputs] == [
        (0, "bc", LENGTH),
        (1, "a", STOP),
    ]


def test_the_likeliest_per_token_are_the_best() -> None:
    made = collector(byte_tokenizer(), n=2, best_of=4)
    sums = {0: [-1.0], 1: [-0.5, -0.7], 2: [-2.0, -2.0], 3: [-0.4, -0.9, -0.8]}
    for index, values in sums.items():
        raw = [TokenLogprobs(value, 1, [], []) for value in values]
        made.add(update(ids_of("abc")[: len(raw)], LENGTH, index, logprobs=raw))
    best, second = made.output().outputs
    assert [(o.index, o.text, o.logprobs) for o in (best, second)] == [(0, "ab", None), (1, "abc", None)]
    assert best.cumulative_logprob == pytest.approx(-1.2)


def test_a_choice_that_failed_is_none_of_the_best() -> None:
    made = collector(byte_tokenizer(), n=1, best_of=2)
    made.add(update([], FinishReason.ERROR, 0, error="bad"))
    made.add(update(ids_of("a"), LENGTH, 1, logprobs=[TokenLogprobs(-50.0, 1, [], [])]))
    assert [o.text for o in made.output().outputs] == ["a"]


@pytest.mark.parametrize(
    ("params", "changes"),
    [
        ({}, {}),
        ({"n": 3}, {}),
        ({"n": 2, "best_of": 3}, {"logprobs": 0}),
        ({"best_of": 3, "logprobs": 5}, {}),
        ({"echo": True}, {}),
        ({"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 4}, {}),
    ],
)
def test_what_the_engine_is_asked_for(params: dict[str, Any], changes: dict[str, Any]) -> None:
    request = Request("r", PROMPT, SamplingParams(**params))
    assert for_engine(request) == replace(request, params=replace(request.params, **changes))


# ---- echo


@pytest.mark.parametrize(
    ("prompt", "truncate", "shown"),
    [("the prompt", None, "the prompt"), (None, None, "<s>ab"), ("more than ab", 3, "<s>ab")],
)
def test_an_echo_comes_first(prompt: str | None, truncate: int | None, shown: str) -> None:
    made = collector(byte_tokenizer(), prompt, echo=True, n=2, truncate_prompt_tokens=truncate)
    for index in (0, 1):
        made.add(update(ids_of("cd"), LENGTH, index))
    assert [o.text for o in made.output().outputs] == [f"{shown}cd"] * 2
    assert [o.token_ids for o in made.output().outputs] == [ids_of("cd")] * 2


def test_an_echo_has_the_prompts_logprobs() -> None:
    made = collector(byte_tokenizer(), echo=True, logprobs=0, prompt_logprobs=1)
    top = [TokenLogprobs(-1.0, 2, [9], [-0.1]), TokenLogprobs(-2.0, 2, [9], [-0.1])]
    made.add(update(ids_of("c"), LENGTH, prompt_logprobs=top, logprobs=[fake_logprobs(ids_of("c")[0], 0)]))
    output = made.output()
    assert [list(known) for known in output.outputs[0].logprobs or []] == [[], *([i] for i in ids_of("abc"))]
    assert [known and len(known) for known in output.prompt_logprobs or []] == [None, 2, 2]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-ids_of("c")[0] / 1000)


# ---- deltas


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_deltas_add_up_to_the_output(every: int) -> None:
    """However seldom they are read."""
    made = collector(byte_tokenizer(), "p: ", n=2, stop="END", echo=True, logprobs=1)
    texts = ("größer END nothing", "ähnlich")
    deltas = []
    for i in range(max(map(len, map(ids_of, texts)))):
        for index, text in enumerate(texts):
            ids = ids_of(text)
            if i < len(ids):
                end = LENGTH if i + 1 == len(ids) else None
                made.add(update(ids[i : i + 1], end, index, logprobs=[fake_logprobs(ids[i], 1)]))
        if i % every == 0:
            deltas += made.deltas()
    deltas += made.deltas()
    assert made.deltas() == []
    for output in made.output().outputs:
        mine = [delta for delta in deltas if delta.index == output.index]
        assert "".join(delta.text for delta in mine) == output.text
        assert [i for delta in mine for i in delta.token_ids] == output.token_ids
        logprobs = [known for delta in mine for known in delta.logprobs or []]
        assert logprobs == (output.logprobs or [])[-len(logprobs) :]
        assert len(logprobs) == len(output.token_ids)
        assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
        assert mine[-1].stop_reason == output.stop_reason
        assert mine[0].text.startswith("p: ")
    assert [output.text for output in made.output().outputs] == ["p: größer ", "p: ähnlich"]


def test_an_infinite_logprob_is_no_obstacle() -> None:
    made = collector(byte_tokenizer(), n=1, best_of=2)
    for index, value in enumerate((-math.inf, -1.0)):
        made.add(
            update(ids_of("ab")[index : index + 1], LENGTH, index, logprobs=[TokenLogprobs(value, 1, [], [])])
        )
    assert [o.text for o in made.output().outputs] == ["b"]


def test_no_jax_is_needed() -> None:
    script = (
        "import sys, hex_llm.frontend.outputs, hex_llm.ipc.protocol, hex_llm.frontend.client, "
        "hex_llm.engine.worker; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
