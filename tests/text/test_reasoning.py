"""Reasoning apart from the answer, in both formats, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hex_llm.errors import ConfigError
from hex_llm.text.reasoning import STARTS_THINKING, reasoning_parser

BOTH = [
    ("<think>\nHm, 2 < 3.\n</think>\n\nYes.\n", ("Hm, 2 < 3.\n", "Yes.\n")),
    (" \n<think>Hm.</think>Yes.", ("Hm.", "Yes.")),
    ("<think>Hm. </thin", ("Hm. </thin", "")),
    ("<think></think>", ("", "")),
    ("<think>a</think>b</think><think>c</think>", ("a", "b</think><think>c</think>")),
    ("", ("", "")),
]
WRITTEN = {
    "deepseek_r1": [*BOTH, ("Hm.\n</think>\n\nYes.", ("Hm.\n", "Yes.")), (" <thi", (" <thi", ""))],
    "qwen3": [*BOTH, ("Hm.</think>Yes.", ("Hm.", "Yes.")), ("Hm <tool_call>{}", ("Hm ", "<tool_call>{}"))],
    "phi4": [*BOTH, ("Yes. <think>no</think>", ("", "Yes. <think>no</think>")), (" <thi", ("", " <thi"))],
}
EVERY = [(name, text, parts) for name, written in WRITTEN.items() for text, parts in written]


def read(name: str, *pieces: str) -> tuple[str, str]:
    parser = reasoning_parser(name)
    told = [parser.add(piece, ended=i + 1 == len(pieces)) for i, piece in enumerate(pieces)]
    return "".join(reasoning for reasoning, _ in told), "".join(content for _, content in told)


@pytest.mark.parametrize(("name", "text", "parts"), EVERY)
def test_reasoning_is_apart(name: str, text: str, parts: tuple[str, str]) -> None:
    assert read(name, text) == parts
    assert read(name, *text, "") == parts


@pytest.mark.parametrize("name", STARTS_THINKING)
def test_both_are_told_as_they_come(name: str) -> None:
    parser = reasoning_parser(name)
    told = [
        parser.add(piece, ended=False) for piece in ("<think>", "Hm", " 2 <", " 3", "</think>\n", "Yes", ".")
    ]
    assert told == [("", ""), ("Hm", ""), (" 2 ", ""), ("< 3", ""), ("", ""), ("", "Yes"), ("", ".")]


PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/", "think>", "a", " ", "\n", "é"]), max_size=12
)


@pytest.mark.parametrize("name", STARTS_THINKING)
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(pieces=PIECES)
def test_any_cut_gives_the_same(name: str, pieces: list[str]) -> None:
    whole = "".join(pieces)
    assert read(name, *pieces, "") == read(name, *whole, "") == read(name, whole)


def test_unknown_names_are_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="deepseek_r1, phi4"):
        reasoning_parser("qwen9")
