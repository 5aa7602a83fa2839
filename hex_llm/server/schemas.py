"""The bodies that OpenAI's and Vertex's routes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import ABOVE, COUNTS, RANGES, SamplingParams, StructuredOutputs
from hex_llm.server.body import (
    Body,
    NamedSchema,
    OneOrMoreTexts,
    Texts,
    TokenIds,
    Whole,
    json_text,
    shown,
    told,
)
from hex_llm.server.messages import Message, NamedTool, Tool

MAX_PROMPTS = 1024  # in one request
SAMPLED = frozenset(field.name for field in fields(SamplingParams))

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
PromptTexts = Annotated[Texts, Field(min_length=1, max_length=MAX_PROMPTS)]
IdLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
Prompt = Annotated[str | TokenIds, told("must be a text or a list of token ids")]
Prompts = Annotated[
    str | PromptTexts | TokenIds | IdLists,
    Field(union_mode="left_to_right"),
    told(f"must be a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"),
]


# ---- what the document of the API says beyond types


def describe_limits(schema: dict[str, Any]) -> None:
    """Those of SamplingParams, for the fields that have its names."""
    for name, known in schema["properties"].items():
        low, high = {**RANGES, **COUNTS}.get(name, (None, None))
        if low is not None and not _is_boolean(known):
            known |= {"exclusiveMinimum" if name in ABOVE else "minimum": low, "maximum": high}


def _is_boolean(known: dict[str, Any]) -> bool:
    """A chat's logprobs are."""
    return {"type": "boolean"} in known.get("anyOf", ())


# ---- what the output must conform to


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def wanted(self) -> StructuredOutputs | None:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format: type json_schema, and no other, has a json_schema", "response_format"
            )
        if self.json_schema is not None:
            return StructuredOutputs(json=json_text(self.json_schema.schema_))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class Structured(Body):
    """vLLM's `structured_outputs`; its older fields have the same names behind `guided_`."""

    json_: Any = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        schema["minProperties"] = 1

    def wanted(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=None if self.json_ is None else json_text(self.json_),
            json_object=self.json_object,
            regex=self.regex,
            choice=tuple(self.choice or ()),
            grammar=self.grammar,
        )


# ---- requests


class Sampling(Body):
    """The fields of SamplingParams, whose defaults they have, and of requests of every kind."""

    model: str = ""  # there is only one, which --strict_model_name holds it to
    user: str = ""
    priority: Whole = 0
    cache_salt: str = ""

    n: Whole | None = None
    best_of: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    seed: Whole | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    stop: OneOrMoreTexts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Whole | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Whole | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: Any = None
    guided_json_object: bool = False
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        describe_limits(schema)

    def params(self) -> SamplingParams:
        """Raises InvalidRequest for what is not allowed."""
        return SamplingParams(**self.sampled(), structured_outputs=self._wanted())

    def sampled(self) -> dict[str, Any]:
        """Those of SamplingParams that were sent."""
        sent = (SAMPLED & self.model_fields_set) - {"structured_outputs"}
        return {name: getattr(self, name) for name in sent}

    def _wanted(self) -> StructuredOutputs | None:
        guided = {
            name.removeprefix("guided_"): getattr(self, name)
            for name in self.model_fields_set
            if name.startswith("guided_") and getattr(self, name) is not False
        }
        sources = (self.response_format, self.structured_outputs, Structured(**guided) if guided else None)
        wanted = [one for source in sources if source is not None and (one := source.wanted()) is not None]
        if len(wanted) > 1:
            raise InvalidRequest(
                "structured_outputs: give only one of response_format, structured_outputs and guided_*",
                "structured_outputs",
            )
        return wanted[0] if wanted else None


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAIRequest(Sampling):
    """What completions and chats have in common. Some fields are for those who look at their own logs."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,200}$")] | None = None  # the end of the reply's
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    safety_identifier: str = ""  # the newer name of user
    prompt_cache_key: str = ""

    def params(self) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options: only together with stream", "stream_options")
        return super().params()


class CompletionRequest(OpenAIRequest):
    prompt: Prompts
    logprobs: Whole | None = None
    echo: bool | None = None
    add_special_tokens: bool = True

    def prompts(self) -> Sequence[str | list[int]]:
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item, return-value]


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Whole | None = None  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: Whole | None = None
    echo: bool = False  # the reply begins with the last message, if that is an assistant's
    metadata: dict[str, str] | None = None

    tools: Annotated[list[Tool], Field(fail_fast=True)] = Field([])
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool,
        told('must be none, auto, required or {"type": "function", "function": {"name": ...}}'),
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
            raise InvalidRequest("top_logprobs: only together with logprobs", "top_logprobs")
        sent["max_tokens"] = newer if newer is not None else self.max_tokens  # None: as long as it gets
        sent["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        sent.pop("echo", None)  # the engine's would be that of the whole prompt
        return sent

    def calls_wanted(self) -> str:
        """none, auto, required, or the name of a tool."""
        choice = self.tool_choice
        wanted = choice if isinstance(choice, str) else choice.function.name
        names = [tool.function.name for tool in self.tools]
        if len({*names, "none", "auto", "required"}) < len(names) + 3:
            raise InvalidRequest("tools: names must differ, also from none, auto and required", "tools")
        if isinstance(choice, NamedTool) and wanted not in names:
            raise InvalidRequest(f"tool_choice: no tool has the name {shown(wanted)}", "tool_choice")
        if wanted == "required" and not names:
            raise InvalidRequest("tool_choice: there are no tools", "tool_choice")
        return wanted if names else "none"


class GenerateRequest(Sampling):
    """One instance of a Vertex prediction."""

    prompt: Prompt
    logprobs: Whole | None = None
    echo: bool | None = None
    raw_response: bool = False

    def sampled(self) -> dict[str, Any]:
        sent = super().sampled()
        # A raw response tells each output's cumulative log-probability.
        return {"logprobs": 0, **sent} if self.raw_response else sent
