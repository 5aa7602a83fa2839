"""Calls of tools are the same however the text is cut, and whatever is lost from it or put in."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.test_tool_calls import MAKERS, TEXTS, Calls, read

PARTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[TOOL_CALLS]",
    "<function=", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", '<invoke name="', '<parameter name="', '">', "</invoke>", "<minimax:tool_call>", "<", ">",
    "<|channel|>commentary to=functions.", "<|message|>", "<|call|>",
    "[ARGS]", "[CALL_ID]", "functools", "<|tool_call|>", "<|/tool_call|>", "{", "}", "[", "]", "(", ")", '"',
    "'", "\\", "\\u00e9", "\\ud83d", ",", ":", ";", "=", " ", "\n", "\t", '{"name": ', '"arguments": ',
    '"parameters": ', "null", "True", "-1.5e7", "f", "é", "日本", "🎉", "\x00", "\x85", "\u2028",
]  # fmt: skip


def mutated(texts: list[str], rng: random.Random) -> list[str]:
    """Pieces of a real output, or of two, in which some parts are lost, repeated, or put in."""
    text = "".join(rng.choices(texts, k=rng.randint(1, 2)))
    for _ in range(rng.randint(0, 6)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 1, 1, 2, 5, 30)))
        put = rng.choice(("", rng.choice(PARTS), rng.choice(PARTS), text[start:end] * 2))
        text = text[:start] + put + text[end:]
    longest, pieces = rng.choice((1, 3, 20)), [""]
    while text:
        size = rng.randint(1, longest)
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, ""]


def check_cut(name: str, seed: int) -> tuple[str, Calls]:
    pieces = mutated(TEXTS[name], random.Random(seed))
    whole = "".join(pieces)
    content, calls = read(MAKERS[name](), whole)
    assert read(MAKERS[name](), *pieces) == (content, calls), pieces
    json.dumps([content, calls], ensure_ascii=False).encode()
    if not calls and not name.startswith("Forced"):
        assert content == whole
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
    return content, calls


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 2**64))
def test_any_cut_gives_the_same(name: str, seed: int) -> None:
    check_cut(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_any_cut_gives_the_same_at_length(name: str) -> None:
    found = [check_cut(name, seed) for seed in range(100_000)]
    assert sum(bool(content) for content, _ in found) > 10_000
    assert sum(bool(calls) for _, calls in found) > 10_000
