"""The body of OpenAI's /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hex_llm.errors import InvalidRequest
from hex_llm.server.common.body import Body, NamedSchema, Whole, fault, parse
from hex_llm.server.openai import schemas
from hex_llm.server.openai.schemas import ChatRequest, Effort, Function, OpenAIRequest, joined

Message = dict[str, Any]  # of a chat

NOT_STORED = "responses are not stored here: send the whole conversation as input (--enable_response_store)"
# Of a chat, which the rest is passed on to as it is.
NOT_OF_RESPONSES = (
    *(
        "best_of",
        "length_penalty",
        "max_tokens",
        "n",
        "prompt_logprobs",
        "response_format",
        "return_token_ids",
    ),
    "use_beam_search",
)
LOGPROBS = "message.output_text.logprobs"

# ---- the conversation


class TextPart(schemas.TextPart):
    type: Literal["input_text", "output_text", "text"]  # type: ignore[assignment]
    annotations: list[Any] = Field([])
    logprobs: list[Any] = Field([])


Texts = Annotated[
    str | Annotated[list[TextPart], Field(fail_fast=True)],
    fault('must be a text or a list of {"type": "input_text", "text": ...}'),
]


class Item(Body):
    """Those that a reply had may come back with its ids and states."""

    id: str = ""
    status: str = ""


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts

    def add_to(self, messages: list[Message]) -> None:
        content = joined(self.content)
        if self.role == "assistant" and messages and _only_reasons(messages[-1]):
            messages[-1]["content"] = content
        else:
            messages.append({"role": self.role, "content": content})


def _only_reasons(message: Message) -> bool:
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


class ReasoningText(schemas.TextPart):
    type: Literal["reasoning_text"]  # type: ignore[assignment]


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[Any] = Field([])
    content: list[ReasoningText] = Field([])

    def add_to(self, messages: list[Message]) -> None:
        messages.append({"role": "assistant", "content": "", "reasoning_content": joined(self.content)})


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def add_to(self, messages: list[Message]) -> None:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": self.name, "arguments": self.arguments}
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": self.call_id, "type": "function", "function": function})


class CallOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts

    def add_to(self, messages: list[Message]) -> None:
        messages.append({"role": "tool", "content": joined(self.output), "tool_call_id": self.call_id})


def _type_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(
        _type_of,
        custom_error_type="item",
        custom_error_message="must be a message, reasoning, a function_call or a function_call_output",
    ),
]


def add_output(output: list[dict[str, Any]], messages: list[Message]) -> None:
    """A reply's items, as they would come back."""
    for item in output:
        if item["type"] == "function_call":
            named = {name: item[name] for name in ("call_id", "name", "arguments")}
            CallItem(type="function_call", **named).add_to(messages)
            continue
        text = "".join(part["text"] for part in item["content"])
        if item["type"] == "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            MessageItem(role="assistant", content=text).add_to(messages)


# ---- the rest


class Format(NamedSchema):
    type: Literal["text", "json_object", "json_schema"]


class TextConfig(Body):
    format: Format | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: Annotated[Literal["auto"], fault("auto is the only one: none")] = "auto"


class FunctionTool(Function):
    type: Literal["function"]


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class StreamOptions(Body):
    pass


class ResponsesRequest(OpenAIRequest):
    """Also takes vLLM's further fields for sampling."""

    input: str | Annotated[list[AnyItem], Field(fail_fast=True, min_length=1)]
    instructions: str | None = None
    max_output_tokens: Whole | None = None
    text: TextConfig = Field(TextConfig())
    reasoning: Reasoning = Field(Reasoning())
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] = Field([])
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction,
        fault('must be none, auto, required or {"type": "function", "name": ...}'),
    ] = "auto"
    parallel_tool_calls: bool = True
    metadata: dict[str, str] = Field({})
    chat_template_kwargs: dict[str, Any] = Field({})
    # Reasoning is told in the clear, so clients that want it back, encrypted, have what they need.
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([])
    top_logprobs: Whole | None = None
    stream_options: StreamOptions | None = None  # type: ignore[assignment]
    store: bool | None = None
    background: bool = False
    enable_response_messages: bool = False  # vLLM's
    previous_response_id: str | None = None
    conversation: Annotated[None, fault("conversations are not stored: see previous_response_id")] = None
    prompt: Annotated[None, fault("prompts are not stored: send it as input")] = None
    truncation: Literal["disabled"] = "disabled"

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        super().describe(schema)
        for name in NOT_OF_RESPONSES:
            del schema["properties"][name]

    def check_store(self, is_on: bool) -> None:
        """Whether there is a store or not."""
        for name in ("store", "background", "previous_response_id"):
            if getattr(self, name) and not is_on:
                raise InvalidRequest.at(name, NOT_STORED)
        if self.background and self.store is False:
            raise InvalidRequest.at("background", "background can only be used when `store` is true")
        if self.background and self.stream:
            raise InvalidRequest.at("background", "not together with stream")

    def chat(self, conversation: list[Message]) -> ChatRequest:
        """Of the conversation, whose last messages are the input."""
        for name in NOT_OF_RESPONSES:
            if name in self.model_fields_set:
                raise InvalidRequest.at(name, "not a field of responses")
        shared = self.model_fields_set & ChatRequest.model_fields.keys() - {"stream", "stream_options"}
        fields = {
            **{name: getattr(self, name) for name in shared},
            "messages": [*self._system(), *conversation],
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._format(),
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools
            ],
            "tool_choice": self._choice(),
            "logprobs": LOGPROBS in self.include,
            "reasoning_effort": self.reasoning.effort,
        }
        return parse(ChatRequest, fields)

    def add_input(self, conversation: list[Message]) -> None:
        if isinstance(self.input, str):
            conversation.append({"role": "user", "content": self.input})
        else:
            for item in self.input:
                item.add_to(conversation)

    def _system(self) -> list[Message]:
        """Those of an earlier response do not hold any more."""
        return [] if self.instructions is None else [{"role": "system", "content": self.instructions}]

    def _format(self) -> dict[str, Any] | None:
        text_format = self.text.format
        if text_format is None:
            return None
        written = text_format.model_dump(by_alias=True, exclude={"type"})
        schema = {"json_schema": written} if text_format.type == "json_schema" else {}
        return {"type": text_format.type, **schema}

    def _choice(self) -> Any:
        choice = self.tool_choice
        return choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
