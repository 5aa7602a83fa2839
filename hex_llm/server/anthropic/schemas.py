"""The bodies of Anthropic's /v1/messages, and the chat that they ask for.

Fields that are not known here are let pass, unlike in other dialects: its clients send those of every beta,
unasked. What could not be answered without them (images, tools that run elsewhere) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from hex_llm.server.common.body import Body, Texts, Whole, describe_limits, fault, parse, shown
from hex_llm.server.openai.schemas import ChatRequest, Effort

Json = dict[str, Any]

# Claude Code writes one into its system prompt, different each time: no prefix would be found again.
BILLING = "x-anthropic-billing-header"


class Lenient(Body):
    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


# ---- the conversation


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Lenient):
    """Another server's thinking, which nobody can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Json


def _known(*kinds: str) -> BeforeValidator:
    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in kinds:
            return block
        named = f"{shown(kind)} is not taken here, only " if isinstance(kind, str) else "must be "
        raise ValueError(f"{named}{', '.join(kinds)}")

    return BeforeValidator(check)


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# A text alone is a block of it.
OR_TEXT = BeforeValidator(_as_blocks, json_schema_input_type=str | list[Json])
TextBlocks = Annotated[list[Annotated[TextBlock, _known("text")]], Field(fail_fast=True), OR_TEXT]


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field([])


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
    _known("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True), OR_TEXT]

    def chat(self) -> list[Json]:
        """Results of tools are messages of their own there."""
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        calls = [_call(block) for block in self.content if isinstance(block, ToolUseBlock)]
        thought = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        messages: list[Json] = [
            {"role": "tool", "tool_call_id": one.tool_use_id, "content": _text(one.content)}
            for one in results
        ]
        if texts or calls or thought or not results:
            content = _text(texts) if texts or not calls else None
            more = {"tool_calls": calls, "reasoning_content": "\n".join(thought)}
            messages.append({"role": self.role, "content": content} | {k: v for k, v in more.items() if v})
        return messages


def _text(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _call(block: ToolUseBlock) -> Json:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


# ---- the rest


class Tool(Lenient):
    type: Annotated[
        Literal["custom"], fault("only custom is taken here: tools of Anthropic's own are not known")
    ] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    input_schema: Json

    def chat(self) -> Json:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False

    def chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(Lenient):
    """How much of it there may be is not held to."""

    type: Literal["enabled", "adaptive", "disabled"]


class OutputFormat(Lenient):
    type: Literal["json_schema"]
    schema_: Any = Field(alias="schema")


class OutputConfig(Lenient):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(Lenient):
    model: str = ""
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    system: TextBlocks = Field([])
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([])
    tool_choice: ToolChoice = Field(ToolChoice(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(OutputConfig())
    mcp_servers: Annotated[list[Any], Field(max_length=0)] = Field([])

    def chat(self) -> ChatRequest:
        messages = [one for message in self.messages for one in message.chat()]
        continues = self.messages[-1].role == "assistant"
        output_format = self.output_config.format
        fields = {
            "model": self.model,
            "messages": [*self._system(), *messages],
            "tools": [tool.chat() for tool in self.tools],
            "tool_choice": self.tool_choice.chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "reasoning_effort": self.output_config.effort,
            "response_format": output_format
            and {"type": "json_schema", "json_schema": {"schema": output_format.schema_}},
            **self._thinking(),
        }
        return parse(ChatRequest, fields | self._sampling())

    def _system(self) -> list[Json]:
        text = _text(block for block in self.system if not block.text.startswith(BILLING))
        return [{"role": "system", "content": text}] if text else []

    def _thinking(self) -> Json:
        """The name that templates know it by; without a word from the client, the model's own default."""
        if self.thinking is None:
            return {}
        wanted = self.thinking.type != "disabled"
        return {"include_reasoning": wanted, "chat_template_kwargs": {"enable_thinking": wanted}}

    def _sampling(self) -> Json:
        return {}


class MessagesRequest(CountRequest):
    max_tokens: Whole
    stop_sequences: Texts = Field([])
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None

    @classmethod
    def describe(cls, schema: Json) -> None:
        describe_limits(schema)

    def _sampling(self) -> Json:
        sent = self.model_fields_set & {"max_tokens", "temperature", "top_p", "top_k"}
        return {**{name: getattr(self, name) for name in sent}, "stop": self.stop_sequences or None}
