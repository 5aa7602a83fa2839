"""What a chat is made of, as OpenAI's clients send it: messages, tools, calls of tools.

What a template makes of them, it knows itself: here they become the plain data that templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from hex_llm.server.common.body import Body, told


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(fail_fast=True)],
    told('must be a text or a list of {"type": "text", "text": ...}'),
]


class HasText(Protocol):
    @property
    def text(self) -> str: ...


def joined(content: str | Sequence[HasText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class CalledFunction(Body):
    name: str
    arguments: str | dict[str, Any] = ""
    parsed_arguments: Any = None  # OpenAI's client sends back what it has made of the others

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        """OpenAI's clients send JSON text; templates print objects."""
        if isinstance(self.arguments, str):
            try:
                self.arguments = json.loads(self.arguments or "{}")
            except (ValueError, RecursionError):
                self.arguments = ""
        if not isinstance(self.arguments, dict):
            raise ValueError("arguments must be a JSON object, or one as text")
        return self


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # a stream told it

    def plain(self) -> dict[str, Any]:
        called = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": called}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field([])
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of the same
    parsed: Any = None  # OpenAI's client sends back what it has made of the content

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Only an assistant need not say anything."""
        calls = {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}}
        says = {"content": {"type": ["string", "array"]}}
        schema["anyOf"] = [
            {"properties": says, "required": ["content"]},
            {"properties": calls, "required": ["tool_calls"]},
        ]

    @model_validator(mode="after")
    def _fits_the_role(self) -> Self:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content or self.reasoning):
            raise ValueError("only an assistant calls tools and reasons")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id is for the role tool")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        return self

    @property
    def text(self) -> str | None:
        return None if self.content is None else joined(self.content)

    def plain(self) -> dict[str, Any]:
        """As templates know it. They tell a call from a text by a content that is none."""
        optional = {
            "name": self.name,
            "tool_calls": [call.plain() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        return {"role": self.role, "content": self.text} | {n: v for n, v in optional.items() if v}


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False  # a forced call keeps to its parameters in any case; others cannot be held to them


class Tool(Body):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """As templates know it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName
