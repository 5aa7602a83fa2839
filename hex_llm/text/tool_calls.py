"""Calls of tools in a model's output: which format it is in, and outputs that are forced to be calls.

Plain text in, plain text out; knows neither requests nor replies, nor how an output is forced.
"""

from __future__ import annotations

from typing import Any

from hex_llm.errors import InvalidRequest, one_line
from hex_llm.text import tagged_calls, tool_formats
from hex_llm.text.json_stream import Reading
from hex_llm.text.tool_formats import ToolParser

PARSERS: dict[str, type[ToolParser]] = {
    "glm45": tagged_calls.Glm45,
    "granite": tool_formats.Hermes,
    "hermes": tool_formats.Hermes,
    "internlm": tool_formats.InternLM,
    "llama3_json": tool_formats.Llama3Json,
    "llama4_pythonic": tool_formats.Pythonic,
    "minimax_m2": tagged_calls.MiniMaxM2,
    "mistral": tool_formats.Mistral,
    "openai": tagged_calls.Harmony,
    "phi4_mini_json": tool_formats.Phi4MiniJson,
    "pythonic": tool_formats.Pythonic,
    "qwen3_coder": tagged_calls.Qwen3Coder,
}
# What only templates of a format have in them, the most telling ones first.
_TAUGHT_BY: dict[str, str] = {
    "[TOOL_CALLS]": "mistral",
    "<|channel|>": "openai",
    "<minimax:tool_call>": "minimax_m2",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<|plugin|>": "internlm",
    "<|start_of_role|>": "granite",
    "<tool_call>": "hermes",
    "functools": "phi4_mini_json",
    "<|tool_call|>": "phi4_mini_json",
    "<|tool|>": "phi4_mini_json",
    "[func_name1(": "llama4_pythonic",
    '{"name": function name, "parameters": ': "llama3_json",
    "<|python_tag|>": "llama3_json",
}


def parser_name_for(chat_template: str | None) -> str | None:
    """Which of PARSERS reads the calls that a chat template teaches; None: it teaches none that we know."""
    template = chat_template or ""
    return next((name for sign, name in _TAUGHT_BY.items() if sign in template), None)


def forced_schema(tools: list[dict[str, Any]], choice: str, *, parallel: bool = True) -> dict[str, Any]:
    """What the output must conform to, for ForcedCalls or ForcedCall to read.

    `choice` is `required`, for one or more calls of any of OpenAI's `tools`, or the name of one. Unless
    `parallel`, there is only one.
    """
    found = schemas(tools)
    if choice != "required":
        if choice not in found:
            raise InvalidRequest.at("tool_choice", f"there is no tool {one_line(choice)}")
        return found[choice]
    if not found:
        raise InvalidRequest.at("tool_choice", "required, but there are no tools")
    # A reference is from the root of the whole, so each schema must be told where it has gone.
    roots = {name: f"#/$defs/tool_{i}" for i, name in enumerate(found)}
    try:
        moved = {f"tool_{i}": _moved(found[name], root) for i, (name, root) in enumerate(roots.items())}
    except RecursionError:
        raise InvalidRequest.at("tools", "the parameters are nested too deeply") from None
    return {
        "type": "array",
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "items": {"anyOf": [_call_schema(name, root) for name, root in roots.items()]},
        "$defs": moved,
    }


def schemas(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of the arguments of OpenAI's tools, by name."""
    return {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}


def _call_schema(name: str, parameters: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": parameters}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """With references that begin at `root` instead of the whole."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


class ForcedCalls(ToolParser):
    """Reads what the schema of `required` lets through. What the end cuts off is nothing, and no content."""

    needs_special_tokens = False
    first = "["

    def give_up(self) -> None:
        if self._stream.is_over:
            self.settle()
        super().give_up()


class ForcedCall(ForcedCalls):
    """Reads what the schema of one tool lets through."""

    first = "{"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def calls(self) -> Reading[None]:
        self.tell(self.name, (yield from self.object()))
