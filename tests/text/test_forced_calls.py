"""Calls that a schema forces: of the tools that there are, with arguments that are theirs."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hex_llm.errors import InvalidRequest
from hex_llm.text.tool_calls import ForcedCall, ForcedCalls, forced_schema
from tests.text.grammars import Setting
from tests.text.test_tool_calls import read

TREE = {
    "type": "object",
    "properties": {
        "value": {"$ref": "#/$defs/value"},
        "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["value"],
    "additionalProperties": False,
    "$defs": {"value": {"enum": ["x", "y{}"]}},
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"]}


def tools(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in parameters.items()]


def test_forced_calls_are_of_the_tools_and_their_parameters(default: Setting) -> None:
    closed = {**CITY, "additionalProperties": False}
    schema = forced_schema(tools(grow=TREE, look=closed, now=None), "required")
    fresh = default.compile(json=json.dumps(schema))
    names = set()
    for seed in range(30):
        text = default.walk(fresh.copy(), random.Random(seed))
        content, calls = read(ForcedCalls(), *text, "")
        assert content == ""
        assert calls
        for name, arguments in calls:
            names.add(name)
            value = json.loads(arguments)
            if name == "grow":
                assert value["value"] in ("x", "y{}")
            else:
                assert value in ({"city": "Rome"}, {"city": "Bonn"}) if name == "look" else value == {}
    assert names == {"grow", "look", "now"}


def test_one_call_only() -> None:
    schema = forced_schema(tools(look=CITY), "required", parallel=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert "maxItems" not in forced_schema(tools(look=CITY), "required")


def test_a_named_tool_forces_its_parameters(default: Setting) -> None:
    schema = forced_schema(tools(now=None, grow=TREE), "grow")
    assert schema == TREE
    text = default.walk(default.compile(json=json.dumps(schema)), random.Random(0))
    content, [(name, arguments)] = read(ForcedCall("grow"), *text, "")
    assert (content, name) == ("", "grow")
    assert json.loads(arguments) == json.loads(text)
    assert forced_schema(tools(now=None), "now")["additionalProperties"] is False


@pytest.mark.parametrize(
    "wanted", [{"json": json.dumps(CITY)}, {"grammar": 'start: "{" other "}"\nother: /[^{}]*/'}]
)
def test_reasoning_may_come_first(default: Setting, wanted: dict[str, Any]) -> None:
    """As far as its first end tag; then nothing but the structure, also where it need not be."""
    answer = '{"city": "Rome"}'
    tagged = default.compile(reasoning=("<think>", "</think>"), **wanted)
    begun = default.compile(reasoning=("</think>",), **wanted)
    for fresh, text, conforms in (
        (tagged, answer, True),
        (tagged, f"<think>Is it {{Bonn}}? </thin> Né.\n</think>\n\n{answer}", True),
        (tagged, f"<think></think>{answer}", True),
        (tagged, f"Hm.</think>{answer}", False),
        (tagged, f"<think>Hm.</think>Well.</think>{answer}", False),
        (begun, f"Hm {{.</think>\n{answer}", True),
        (begun, f"Hm.</think>Well.</think>{answer}", False),
        (begun, f"Hm. {answer}", None),
    ):
        matcher = fresh.copy()
        ids = default.tokenizer.encode(text, add_special_tokens=False)
        assert all(map(matcher.accept, ids)) == (conforms is not False)
        ends = default.allowed(matcher)[list(default.eos_ids)].any() if conforms is not False else False
        assert bool(ends) == bool(conforms)


def test_what_cannot_be_forced_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(5_000):
        nested = {"properties": {"a": nested}}
    for given_tools, choice, param in (
        (tools(look=CITY), "fly", "tool_choice"),
        ([], "required", "tool_choice"),
        (tools(deep=nested), "required", "tools"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            forced_schema(given_tools, choice)
        assert refused.value.param == param


def test_a_forced_call_that_breaks_at_the_very_end_is_content() -> None:
    """The end does not cut it off: it was none before."""
    text = '[{"name": "now", "rameters":'
    assert read(ForcedCalls(), text) == read(ForcedCalls(), text, "") == (text, [])
