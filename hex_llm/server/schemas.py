"""The bodies that the routes take, and how their faults are told.

A body has the fields of its model. What is not built yet may be sent only with a value that changes nothing
(INERT); null is the same as absent. Anything else is refused by its name: nothing is silently ignored. Only
shapes are checked here; what values a request may have, SamplingParams and the engine know.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from hex_llm.errors import InvalidRequest, one_line
from hex_llm.sampling_params import SamplingParams, StructuredOutputs

MAX_PROMPTS = 1024  # in one request
SAMPLED = frozenset(field.name for field in fields(SamplingParams))
INERT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "annotations": ([],),
    "audio": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),  # of a chat
    "function_call": (),
    "length_penalty": (1,),
    "metadata": ({},),
    "name": (),
    "parallel_tool_calls": (True, False),
    "reasoning_content": (),
    "reasoning_effort": (),
    "refusal": (),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),  # of a completion
    "use_beam_search": (False,),
}

Kind = TypeVar("Kind", bound="Body")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(values: Any) -> Any:
    return [_whole(value) for value in values] if isinstance(values, list) else values


def _told(message: str) -> WrapValidator:
    """One message for all that can be wrong in a union, whose own would be one for each member."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(message) from None

    return WrapValidator(check)


# A Vertex client's numbers come out of protobuf, where all of them are doubles: 50 is sent as 50.0.
Whole = Annotated[int, BeforeValidator(_whole)]
TokenIds = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_all_whole)]
Texts = Annotated[list[str], Field(fail_fast=True)]
PromptTexts = Annotated[Texts, Field(min_length=1, max_length=MAX_PROMPTS)]
IdLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
Prompt = Annotated[str | TokenIds, _told("must be a text or a list of token ids")]
Prompts = Annotated[
    str | PromptTexts | TokenIds | IdLists,
    Field(union_mode="left_to_right"),
    _told(f"must be a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"),
]
OneOrMoreTexts = Annotated[str | Texts, _told("must be a text or a list of texts")]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # forbid: for the schema

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in values.items():
            if name not in known and not _is_inert(name, value):
                # pydantic would go on and make a million errors of as many
                about = {"field": shown(name), "reason": not_built(name)}
                raise PydanticCustomError("not_built", "{reason}", about)
            if name in known and value is not None:
                kept[name] = value
        return kept


def _is_inert(name: str, value: Any) -> bool:
    if value is None:
        return name in INERT
    # True == 1, but a boolean is no number.
    return any(value == inert and type(value) in _types(inert) for inert in INERT.get(name, ()))


def _types(value: Any) -> tuple[type, ...]:
    return (int, float) if type(value) is int else (type(value),)


# ---- what the output must conform to


class NamedSchema(Body):
    name: str = ""  # for the model's eyes, elsewhere
    description: str = ""
    strict: bool = True  # it always is
    schema_: Any = Field({}, alias="schema")


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def wanted(self) -> StructuredOutputs | None:
        if (self.json_schema is None) == (self.type == "json_schema"):
            raise InvalidRequest(
                "response_format: type json_schema, and no other, has a json_schema", "response_format"
            )
        if self.json_schema is not None:
            return StructuredOutputs(json=_json_text(self.json_schema.schema_))
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


class Structured(Body):
    """vLLM's `structured_outputs`; its older fields have the same names behind `guided_`."""

    json_: Any = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None

    def wanted(self) -> StructuredOutputs:
        json_text = None if self.json_ is None else _json_text(self.json_)
        return StructuredOutputs(
            json=json_text,
            json_object=self.json_object,
            regex=self.regex,
            choice=tuple(self.choice or ()),
            grammar=self.grammar,
        )


def _json_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


# ---- requests


class Sampling(Body):
    """The fields of SamplingParams, whose defaults they have, and of requests of every kind."""

    model: str = ""  # there is only one, whatever it is called
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


class CompletionRequest(Sampling):
    prompt: Prompts
    logprobs: Whole | None = None
    echo: bool | None = None

    def prompts(self) -> Sequence[str | list[int]]:
        one = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt  # type: ignore[list-item, return-value]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | Annotated[list[TextPart], Field(fail_fast=True)],
        _told('must be a text or a list of {"type": "text", "text": ...}'),
    ]

    def plain(self) -> dict[str, str]:
        """As templates know it."""
        parts = self.content
        return {
            "role": self.role,
            "content": parts if isinstance(parts, str) else "\n".join(part.text for part in parts),
        }


class ChatRequest(Sampling):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Whole | None = None  # the newer name of max_tokens
    logprobs: bool = False
    top_logprobs: Whole | None = None

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
        return sent


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


def parse(kind: type[Kind], values: Any, where: str = "") -> Kind:
    """InvalidRequest tells the first fault, behind `where`."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problem = invalid(error.errors(include_url=False, include_input=False))
        raise InvalidRequest(f"{where}{problem}", problem.param) from None


def invalid(errors: Sequence[Any]) -> InvalidRequest:
    """The first of pydantic's errors as ours; `loc` is the path to the field."""
    first = errors[0]
    steps = (*first["loc"], first["ctx"]["field"]) if first["type"] == "not_built" else first["loc"]
    path = [shown(str(step)) for step in steps]
    message = ": ".join(filter(None, (".".join(path), first["msg"].removeprefix("Value error, "))))
    return InvalidRequest(message, path[0] if path else None)


def not_built(name: str) -> str:
    if name not in INERT:
        return "unknown field, or not built yet"
    return f"not built yet; only {' or '.join(map(json.dumps, (*INERT[name], None)))} is taken"


def shown(text: str) -> str:
    """A piece of a request for a message: on one line, not too long, and no half characters."""
    return one_line(text)[:80]
