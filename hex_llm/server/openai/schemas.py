"""The bodies that OpenAI's routes take: completions, and chats with their messages, tools and calls.

What a template makes of messages, it knows itself: here they become the plain data that templates expect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hex_llm.config import ServerConfig
from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import SamplingParams
from hex_llm.server.common.body import MAX_PROMPTS, Body, Sampling, Texts, TokenIds, Whole, fault, shown

BOOLEANS = {"true": True, "false": False}  # as some clients write them
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
PromptTexts = Annotated[Texts, Field(min_length=1, max_length=MAX_PROMPTS)]
IdLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
Prompts = Annotated[
    str | PromptTexts | TokenIds | IdLists,
    Field(union_mode="left_to_right"),
    fault(f"must be a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"),
]


def listed(prompts: Prompts) -> Sequence[str | list[int]]:
    one = isinstance(prompts, str) or not prompts or isinstance(prompts[0], int)
    return [prompts] if one else prompts  # type: ignore[list-item, return-value]


# ---- what a chat is made of


class Replayed(Body):
    """What clients have got from us or from others, and send back with fields of their own."""

    model_config = ConfigDict(extra="allow")
    takes_more = True


class TextPart(Replayed):
    type: Literal["text"]
    text: str


Content = Annotated[
    str | Annotated[list[TextPart], Field(fail_fast=True)],
    fault('must be a text or a list of {"type": "text", "text": ...}: neither images nor sounds are taken'),
]


def joined(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class CalledFunction(Replayed):
    name: str
    arguments: str | dict[str, Any] = ""

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        """OpenAI's clients send JSON text; templates print objects. What a model has written amiss, a
        conversation cannot get rid of any more: as in vLLM it is an empty one."""
        if isinstance(self.arguments, str):
            try:
                parsed = json.loads(self.arguments)
            except (ValueError, RecursionError):
                parsed = None
            self.arguments = parsed if isinstance(parsed, dict) else {}
        return self


class ToolCall(Replayed):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        called = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": self.type, "function": called}


class Message(Replayed):
    """Roles and fields that are not known are the template's."""

    role: Annotated[str, Field(min_length=1, max_length=128)]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = Field([])
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name of the same

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Only an assistant need not say anything."""
        schema["anyOf"] = [
            {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]},
            {"properties": {"role": {"const": "assistant"}}},
        ]

    @model_validator(mode="after")
    def _fits_the_role(self) -> Self:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content or self.reasoning):
            raise ValueError("only an assistant calls tools and reasons")
        if self.content is None and self.role != "assistant":
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
        known = {"role": self.role, "content": self.text} | {n: v for n, v in optional.items() if v}
        return {**(self.model_extra or {}), **known}


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


# ---- requests


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIRequest(Sampling):
    """What completions and chats have in common. Some fields are for those who look at their own logs."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,200}$")] | None = None  # the end of the reply's
    use_beam_search: bool = False
    length_penalty: float = 1.0  # of beams
    logprob_token_ids: TokenIds = Field([])
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    safety_identifier: str = ""  # the newer name of user
    prompt_cache_key: str = ""

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest.at("stream_options", "only together with stream")
        if self.logprob_token_ids and self.sampled().get("logprobs") is None:
            raise InvalidRequest.at("logprob_token_ids", "only together with logprobs")
        return super().params(defaults)

    def follow(self, config: ServerConfig) -> None:
        """What the server does whether or not it is asked for."""
        self.return_tokens_as_token_ids |= config.return_tokens_as_token_ids
        if config.enable_force_include_usage and self.stream:
            self.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)


class CompletionRequest(OpenAIRequest):
    prompt: Prompts
    logprobs: Whole | None = None
    echo: bool | None = None
    add_special_tokens: bool = True

    @model_validator(mode="before")
    @classmethod
    def _has_a_prompt(cls, values: Any) -> Any:
        """In vLLM's words, which clients look for."""
        if isinstance(values, dict) and values.get("prompt") is None:
            reason = "Either prompt or prompt_embeds must be provided and non-empty."
            raise PydanticCustomError("missing", "{reason}", {"field": "prompt", "reason": reason})
        return values

    def prompts(self) -> Sequence[str | list[int]]:
        return listed(self.prompt)


class KVTransfer(Body):
    """What another server tells of the prompt that it has read; its keys and values cannot be fetched."""

    prompt_token_ids: TokenIds | None = None


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Whole | None = None  # the newer name of max_tokens
    logprobs: Annotated[bool, BeforeValidator(lambda value: BOOLEANS.get(str(value), value))] = False
    top_logprobs: Whole | None = None
    echo: bool = False  # the reply begins with the last message, if that is an assistant's
    metadata: dict[str, str] | None = None
    kv_transfer_params: KVTransfer | None = None

    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([])
    tool_choice: Annotated[
        str | NamedTool,  # TGI's clients send the name alone
        fault('must be none, auto, required or {"type": "function", "function": {"name": ...}}'),
    ] = "auto"
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    # For the template:
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # the template writes them
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field({})

    def sampled(self) -> dict[str, Any]:
        sent = super().sampled()
        newer = self.max_completion_tokens
        if newer is not None and self.max_tokens not in (None, newer):
            raise InvalidRequest(
                "max_completion_tokens and max_tokens contradict each other", "max_completion_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest.at("top_logprobs", "only together with logprobs")
        if newer is not None:
            sent["max_tokens"] = newer
        sent["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        sent.pop("echo", None)  # the engine's would be that of the whole prompt
        return sent

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Unless something is said, a reply gets as long as it can."""
        return super().params({"max_tokens": None, **(defaults or {})})

    def tool_choice_name(self) -> str:
        """none, auto, required, or the name of a tool."""
        choice = self.tool_choice
        name = choice if isinstance(choice, str) else choice.function.name
        names = [tool.function.name for tool in self.tools]
        if len({*names, "none", "auto", "required"}) < len(names) + 3:
            raise InvalidRequest.at("tools", "names must differ, also from none, auto and required")
        if name not in (*names, "none", "auto", "required"):
            raise InvalidRequest.at("tool_choice", f"no tool has the name {shown(name)}")
        if name == "required" and not names:
            raise InvalidRequest.at("tool_choice", "there are no tools")
        return name if names else "none"


class BatchChatRequest(ChatRequest):
    """vLLM's: several conversations, each of which gets one choice."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[Message], Field(fail_fast=True, min_length=1)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
    ]

    def chats(self) -> list[ChatRequest]:
        for name in ("n", "best_of", "stream", "tools", "use_beam_search", "prompt_logprobs"):
            value = getattr(self, name)
            if value is True or value not in (None, False, 1, []):
                raise InvalidRequest.at(name, "not in a batch of chats")
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]
