"""Reasoning in chats: told apart from text and calls, whole and in chunks, and counted."""

from __future__ import annotations

from typing import Any

import pytest

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from tests.server.asking import CHAT, HELLO, post, stream
from tests.server.test_chat import FORCED, HERMES, TOOLS, TWO_CALLS, both_ways, calls_in, speaker


def test_reasoning_is_told_apart() -> None:
    backend = speaker(f"<think>Two\nplaces.</think>\n\n{TWO_CALLS}")
    choice = both_ways(backend, {"tools": TOOLS}, reasoning_parser="phi4")
    said = choice["message"]
    assert said["reasoning_content"].strip() == said["reasoning"].strip() == "Two\nplaces."
    assert said["content"].strip() == "Let me see."
    assert len(calls_in(choice)) == 2
    without = both_ways(backend, {"tools": TOOLS, "include_reasoning": False}, reasoning_parser="phi4")
    assert not {"reasoning", "reasoning_content"} & without["message"].keys()
    plain = both_ways(backend, {})
    assert plain["message"]["content"] == backend.text


@pytest.mark.parametrize("included", [True, False])
def test_tokens_of_reasoning_are_counted(included: bool) -> None:
    """One is a byte here, and pieces have one each."""
    backend = speaker("<think>Two <b>\nplaces.</think>\n\nHi.")
    config = {"config": {"reasoning_parser": "phi4"}}
    body = {**HELLO[CHAT], "include_reasoning": included, "n": 2}
    counted = {"reasoning_tokens": 2 * len("Two <b>\nplaces.")}
    assert post(backend, CHAT, body, **config)["usage"]["completion_tokens_details"] == counted
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = stream(backend, CHAT, {**body, **options}, **config)
    assert last["usage"]["completion_tokens_details"] == counted


HARMONY = "{# <|channel|> #}<|start|>{{ messages[0].content }}{{ reasoning_effort }}<|start|>assistant"
SAID_IN_CHANNELS = (
    "<|channel|>analysis<|message|>Two places.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather <|constrain|>json<|message|>{"place": "Röm"}<|call|>'
)


def test_channels_of_gpt_oss() -> None:
    """Found out from the template, both of them."""
    backend = speaker(SAID_IN_CHANNELS, HARMONY)
    choice = both_ways(backend, {"tools": TOOLS, "reasoning_effort": "high"})
    assert choice["message"]["reasoning_content"] == "Two places."
    assert not choice["message"]["content"]
    assert calls_in(choice) == [("weather", {"place": "Röm"})]
    request = backend.asked[-1]
    assert backend.tokenizer.decode(request.prompt_ids).endswith("high<|start|>assistant")
    assert not request.params.skip_special_tokens
    final = both_ways(speaker("<|channel|>final<|message|>Yes.", HARMONY), {})
    assert (final["message"]["content"], final["message"].get("reasoning")) == ("Yes.", None)


THINKS = (
    "{{ messages[0].content }}<|im_start|>assistant\n{# </think> #}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif begins %}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "kwargs", "reasoning", "content"),
    [
        ("<think>Hm.</think>Yes.", {}, "Hm.", "Yes."),
        ("Hm.</think>Yes.", {"begins": True}, "Hm.", "Yes."),
        ("Yes.", {}, None, "Yes."),
        ("<think>Yes.", {"enable_thinking": False}, None, "<think>Yes."),
    ],
)
def test_reasoning_is_found_out_from_template_and_prompt(
    text: str, kwargs: dict[str, Any], reasoning: str | None, content: str
) -> None:
    message = both_ways(speaker(text, THINKS), {"chat_template_kwargs": kwargs})["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    as_it_is = both_ways(speaker(text, THINKS), {"chat_template_kwargs": kwargs}, reasoning_parser="none")
    assert as_it_is["message"]["content"] == text


def test_a_format_that_the_template_does_not_have_is_told(caplog: pytest.LogCaptureFixture) -> None:
    create_app(speaker("", HERMES), ServerConfig(tool_call_parser="hermes", reasoning_parser="qwen3"))
    [record] = [one.message for one in caplog.records if "chat template" in one.message]
    assert record.startswith("--reasoning_parser")


@pytest.mark.parametrize(
    ("said", "begins", "around"),
    [
        ("<think>Hm <tool_call>.</think>\n\n", False, ("<think>", "</think>")),
        ("Hm <tool_call>.</think>", True, ("</think>",)),
        ("", False, ("<think>", "</think>")),
    ],
)
@pytest.mark.parametrize("parser", [None, "qwen3", "deepseek_r1"])
def test_reasoning_comes_before_a_call_that_is_forced(
    said: str, begins: bool, around: tuple[str, ...], parser: str | None
) -> None:
    """Only tags tell: what is no reasoning by the grammar is none by the parser."""
    backend = speaker(said + FORCED, THINKS)
    body = {"tools": TOOLS, "tool_choice": "required", "chat_template_kwargs": {"begins": begins}}
    choice = both_ways(backend, body, reasoning_parser=parser)
    assert calls_in(choice) == [("weather", {"place": "Röm"})]
    assert choice["message"].get("reasoning") == ("Hm <tool_call>." if said else None)
    assert not choice["message"]["content"]
    wanted = backend.asked[-1].params.structured_outputs
    assert wanted is not None
    assert wanted.reasoning == around


def test_a_structure_may_come_without_reasoning() -> None:
    backend = speaker('{"a": 1}')
    choice = both_ways(backend, {"guided_json_object": True}, reasoning_parser="deepseek_r1")
    assert choice["message"] == {"role": "assistant", "content": '{"a": 1}'}
    for kwargs in ({"enable_thinking": False}, {}):
        text = '{"a": 1}' if kwargs else '<think>b</think>{"a": 1}'
        backend = speaker(text, THINKS)
        body = {"response_format": {"type": "json_object"}, "chat_template_kwargs": kwargs}
        assert both_ways(backend, body)["message"]["content"] == '{"a": 1}'
        wanted = backend.asked[-1].params.structured_outputs
        assert wanted is not None
        assert bool(wanted.reasoning) == (not kwargs)


def test_a_structure_has_no_room_for_channels() -> None:
    backend = speaker('{"a": 1}', HARMONY)
    assert both_ways(backend, {"guided_json_object": True})["message"]["content"] == '{"a": 1}'
    wanted = backend.asked[-1].params.structured_outputs
    assert wanted is not None
    assert not wanted.reasoning
