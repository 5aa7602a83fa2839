"""The bodies that the routes take, and how their faults are told.

A body has the fields of its model. What is not built yet may be sent only with a value that changes nothing
(INERT); null is the same as absent. Anything else is refused by its name: nothing is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
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
from hex_llm.types import SamplingParams

MAX_INT = 2**31 - 1
MAX_PROMPTS = 1024  # in one request
INERT: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "annotations": ([],),
    "audio": (),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "name": (),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_content": (),
    "reasoning_effort": (),
    "refusal": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "store": (False,),
    "stream": (False,),
    "stream_options": (),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "top_p": (1,),
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
WHOLE = BeforeValidator(_whole)
Count = Annotated[int, Field(ge=1, le=MAX_INT), WHOLE]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(_all_whole)]
Texts = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
IdLists = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
Prompt = Annotated[str | TokenIds, _told("must be a text or a list of token ids")]
Prompts = Annotated[
    str | Texts | TokenIds | IdLists,
    Field(union_mode="left_to_right"),
    _told(f"must be a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"),
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # forbid: for the schema

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        kept = {}
        for name, value in values.items():
            if cls._is_inert(name, value):
                continue
            if name not in cls.model_fields:  # pydantic would go on and make a million errors of as many
                about = {"field": shown(name), "reason": not_built(name)}
                raise PydanticCustomError("not_built", "{reason}", about)
            kept[name] = value
        return kept

    @classmethod
    def _is_inert(cls, name: str, value: Any) -> bool:
        if value is None:
            return name in cls.model_fields or name in INERT
        # True == 1, but a boolean is no number.
        return any(value == inert and type(value) in _types(inert) for inert in INERT.get(name, ()))


def _types(value: Any) -> tuple[type, ...]:
    return (int, float) if type(value) is int else (type(value),)


class Sampling(Body):
    model: str = ""  # there is only one, whatever it is called
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_k: Annotated[int, Field(ge=-1, le=1), WHOLE] = -1  # more are not built yet
    max_tokens: Count | None = 16
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), WHOLE] = 0  # greedy search draws no random numbers
    user: str = ""

    def params(self) -> SamplingParams:
        """Raises InvalidRequest for what is not built."""
        return SamplingParams(
            temperature=0.0 if self.top_k == 1 else self.temperature,  # top_k=1 is greedy at any temperature
            max_tokens=self.max_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionRequest(Sampling):
    prompt: Prompts

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
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None  # the newer name of max_tokens

    def params(self) -> SamplingParams:
        if self.max_completion_tokens and self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest(
                "max_completion_tokens and max_tokens contradict each other", "max_completion_tokens"
            )
        return replace(super().params(), max_tokens=self.max_completion_tokens or self.max_tokens)


class GenerateRequest(Sampling):
    """One instance of a Vertex prediction."""

    prompt: Prompt
    raw_response: bool = False


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
