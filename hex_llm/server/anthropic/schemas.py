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
# Blocks, and what each must have. Thinking that is redacted is another server's, which nobody can read.
BLOCKS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


class Lenient(Body):
    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


# ---- the conversation


def _of(*kinds: str) -> BeforeValidator:
    """Refuses blocks of other kinds, and those that lack something."""

    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            named = f"{shown(kind)} is not taken here, only" if isinstance(kind, str) else "must be"
            raise ValueError(f"{named} {', '.join(kinds)}")
        if lacks := [name for name in BLOCKS[kind] if block.get(name) is None]:
            raise ValueError(f"{kind} must have {', '.join(lacks)}")
        return block

    return BeforeValidator(check)


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# A text alone is a block of it.
OR_TEXT = BeforeValidator(_as_blocks, json_schema_input_type=str | list[Json])


class TextBlock(Lenient):
    text: str = ""


TextBlocks = Annotated[list[Annotated[TextBlock, _of("text")]], Field(fail_fast=True), OR_TEXT]


class Block(TextBlock):
    type: str
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Json = Field({})
    tool_use_id: str = ""
    content: TextBlocks = Field([])

    def chat(self) -> Json:
        """A call, or the result of one."""
        if self.type == "tool_result":
            return {"role": "tool", "tool_call_id": self.tool_use_id, "content": _text(self.content)}
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class Message(Lenient):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Annotated[Block, _of(*BLOCKS)]], Field(fail_fast=True), OR_TEXT]

    def chat(self) -> list[Json]:
        """Results of tools are messages of their own there."""
        blocks: dict[str, list[Block]] = {kind: [] for kind in BLOCKS}
        for block in self.content:
            blocks[block.type].append(block)
        calls, texts = [one.chat() for one in blocks["tool_use"]], blocks["text"]
        results = [one.chat() for one in blocks["tool_result"]]
        if results and len(results) == len(self.content):
            return results
        thought = "\n".join(block.thinking for block in blocks["thinking"])
        message: Json = {"role": self.role, "content": _text(texts) if texts or not calls else None}
        return [
            *results,
            message | ({"tool_calls": calls} if calls else {}) | ({"reasoning": thought} if thought else {}),
        ]


def _text(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


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
    """What is said of sampling changes no count."""

    model: str = ""
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    system: TextBlocks = Field([])
    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([])
    tool_choice: ToolChoice = Field(ToolChoice(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(OutputConfig())
    mcp_servers: Annotated[list[Any], Field(max_length=0)] = Field([])
    max_tokens: Whole | None = None
    stop_sequences: Texts = Field([])
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None

    @classmethod
    def describe(cls, schema: Json) -> None:
        describe_limits(schema)

    def chat(self) -> ChatRequest:
        sampled = self.model_fields_set & {"model", "max_tokens", "temperature", "top_p", "top_k"}
        fields: Json = {name: getattr(self, name) for name in sampled}
        system = _text(block for block in self.system if not block.text.startswith(BILLING))
        fields["messages"] = [{"role": "system", "content": system}] if system else []
        fields["messages"] += [one for message in self.messages for one in message.chat()]
        if self.messages[-1].role == "assistant":
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.thinking is not None:  # under the name that templates know
            thinks = self.thinking.type != "disabled"
            fields |= {"include_reasoning": thinks, "chat_template_kwargs": {"enable_thinking": thinks}}
        if (wanted := self.output_config.format) is not None:
            fields["response_format"] = {"type": wanted.type, "json_schema": {"schema": wanted.schema_}}
        fields |= {
            "stop": self.stop_sequences or None,
            "tools": [tool.chat() for tool in self.tools],
            "tool_choice": self.tool_choice.chat(),
            "parallel_tool_calls": not self.tool_choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
        }
        return parse(ChatRequest, fields)


class MessagesRequest(CountRequest):
    max_tokens: Whole
