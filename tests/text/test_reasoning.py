"""Reasoning apart from the answer, in every format, however the text is cut."""

from __future__ import annotations

import random
import time

import pytest

from hex_llm.errors import ConfigError
from hex_llm.text.reasoning import FORMATS, format_name_for, may_reason, reasoning_parser
from hex_llm.text.tool_calls import PARSERS

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
    "glm45": [*BOTH, ("<think>Hm <tool_call>f", ("Hm ", "<tool_call>f"))],
    "minimax_m2": [*BOTH, ("Hm.</think>\n\nYes.", ("Hm.", "Yes."))],
    "granite": [
        ("Here is my thought process:\nHm.\n\nHere is my response:\nYes.", ("Hm.\n\n", "Yes.")),
        ("Here is my dog.", ("", "Here is my dog.")),
    ],
    "mistral": [("[THINK]Hm.[/THINK]Yes.", ("Hm.", "Yes.")), ("[TH", ("", "[TH"))],
    "openai_gptoss": [
        (
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
            ("Hm", "Yes."),
        ),
        (
            "<|channel|>analysis<|message|>2 < 3<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.f <|constrain|>json<|message|>{}<|call|>",
            ("2 < 3", "<|channel|>commentary to=functions.f<|message|>{}<|call|>"),
        ),
        (
            "<|start|>assistant to=functions.f<|channel|>analysis json<|message|>{}",
            ("", "<|channel|>commentary to=functions.f<|message|>{}"),
        ),
        ("<|channel|>commentary<|message|>Wait.<|channel|>final<|message|>So.", ("", "Wait.So.")),
        ("Yes.<|channel|>final", ("", "Yes.")),
        ("<|channel|>final <|constrain|>json<|message|>{}", ("", "{}")),
    ],
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


THINKERS = [name for name, tags in FORMATS.items() if tags is not None and tags.start == "<think>"]


@pytest.mark.parametrize("name", THINKERS)
def test_both_are_told_as_they_come(name: str) -> None:
    parser = reasoning_parser(name)
    told = [
        parser.add(piece, ended=False) for piece in ("<think>", "Hm", " 2 <", " 3", "</think>\n", "Yes", ".")
    ]
    assert told == [("", ""), ("Hm", ""), (" 2 ", ""), ("< 3", ""), ("", ""), ("", "Yes"), ("", ".")]


PARTS = [
    *("<think>", "</think>", "<", "/", "think>", "a", " ", "\n", "é", "[THINK]", "[/THINK]", "<tool_call>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|", "analysis"),
    *("<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>commentary to=functions.f<|message|>"),
    "final",
    *(" to=functions.f", "commentary", "Here is my thought process:", "Here is my response:", "Here is"),
]


def check_cut(name: str, rng: random.Random) -> tuple[str, str]:
    pieces = rng.choices(PARTS, k=rng.randrange(13))
    whole = "".join(pieces)
    told = read(name, whole)
    assert read(name, *pieces, "") == read(name, *whole, "") == told, pieces
    return told


@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_gives_the_same(name: str) -> None:
    rng = random.Random(0)
    for _ in range(300):
        check_cut(name, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_any_cut_gives_the_same_at_length(name: str) -> None:
    rng = random.Random(1)
    told = [check_cut(name, rng) for _ in range(100_000)]
    assert sum(bool(content) for _, content in told) > 1_000
    assert sum(bool(reasoning) for reasoning, _ in told) > 1_000


def test_the_time_of_channels_is_linear() -> None:
    def seconds(unit: str, num: int) -> float:
        started = time.process_time()
        read("openai_gptoss", *(unit * num), "")
        return time.process_time() - started

    for unit in ("<|channel|>", "<|message|>", "<|channel|>analysis<|message|>a"):
        assert seconds(unit, 4000) < 8 * max(seconds(unit, 1000), 0.02)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("<|im_start|>assistant\n", ("", "Hm.</think>Yes.")),
        ("<|im_start|>assistant\n<think>\n", ("Hm.", "Yes.")),
        ("<think>a</think>b<|im_start|>assistant\n", ("", "Hm.</think>Yes.")),
    ],
)
def test_the_prompt_tells_whether_reasoning_has_begun(prompt: str, said: tuple[str, str]) -> None:
    assert reasoning_parser("qwen3", prompt, by_prompt=True).add("Hm.</think>Yes.", ended=True) == said


def test_there_is_none_behind_tags_that_the_prompt_closes() -> None:
    assert not may_reason("glm45", {}, "<|assistant|>\n<think></think>\n")
    assert not may_reason("qwen3", {"enable_thinking": False}, "")
    assert may_reason("openai_gptoss", {}, "<|start|>assistant")


TEMPLATES = {
    "glm45": "<arg_key>...</arg_key> {{ '<think></think>' if not enable_thinking }}",
    "granite": "Write your thoughts after 'Here is my thought process:'",
    "minimax_m2": "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<think>",
    "mistral": "{{ '[THINK]' + thinking + '[/THINK]' }}[TOOL_CALLS]",
    "openai_gptoss": "<|start|>assistant<|channel|>analysis<|message|>",
    "qwen3": "{%- if '</think>' in content %}<tool_call>",
    None: "<tool_call>{{ messages }}",
}


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_templates_tell_their_format(name: str | None, template: str) -> None:
    assert format_name_for(template) == name


def test_calls_of_gpt_oss_are_read_behind_its_reasoning() -> None:
    _, content = read("openai_gptoss", '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>')
    [call] = PARSERS["openai"]().add(content, ended=True).calls
    assert (call.name, call.arguments) == ("f", '{"a": 1}')


def test_unknown_names_are_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="deepseek_r1, glm45"):
        reasoning_parser("qwen9")
