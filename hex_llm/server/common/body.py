"""What all bodies have in common: what their fields may be, those of SamplingParams among them, and how their
faults are told.

A body has the fields of its model. What is not built may be sent only with a value that changes nothing
(INERT); null is the same as absent. Anything else is refused by its name: nothing is silently ignored. Only
shapes are checked here; what values a request may have, SamplingParams and the engine know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

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
from hex_llm.sampling_params import ABOVE, COUNTS, RANGES, SamplingParams, StructuredOutputs


def _only(names: str, *values: Any) -> dict[str, tuple[Any, ...]]:
    """What these fields may be, beside null."""
    return dict.fromkeys(names.split(), values)


# Also fields that other routes know: clients send one set of options everywhere.
INERT: dict[str, tuple[Any, ...]] = (
    _only("audio chat_template function_call name prediction prompt_embeds reasoning reasoning_content")
    | _only("reasoning_effort refusal repetition_detection request_id stream_options structural_tag")
    | _only("thinking_token_budget web_search_options whitespace_pattern")
    | _only("annotations documents functions logprob_token_ids tool_calls tools", [])
    | _only("chat_template_kwargs kv_transfer_params metadata mm_processor_kwargs", {})
    | _only("add_generation_prompt add_special_tokens include_reasoning spaces_between_special_tokens", True)
    | _only("continue_final_message disable_additional_properties disable_any_whitespace", False)
    | _only("disable_fallback echo include_obfuscation return_token_ids return_tokens_as_token_ids", False)
    | _only("store stream use_beam_search", False)
    | _only("length_penalty stream_interval", 1)
    | _only("modalities", ["text"])
    | _only("parallel_tool_calls", True, False)
    | _only("service_tier", "auto", "default")
    | _only("suffix", "")
    | _only("tool_choice", "none", "auto")
    | _only("no_repeat_ngram_size top_logprobs", 0)
    | _only("verbosity", "medium")
)

MAX_SCHEMA = 20_000  # values of a JSON schema, or of all tools: made into JSON in some milliseconds

Kind = TypeVar("Kind", bound="Body")


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _all_whole(values: Any) -> Any:
    # Lists are long, and hardly one has floats.
    has_floats = isinstance(values, list) and float in set(map(type, values))
    return [_whole(value) for value in values] if has_floats else values


def fault(message: str) -> WrapValidator:
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
OneOrMoreTexts = Annotated[str | Texts, fault("must be a text or a list of texts")]


def _described(schema: dict[str, Any], kind: type[Body]) -> None:
    properties = schema.get("properties", {})
    for name in properties.keys() - schema.get("required", ()):
        properties[name] = _or_null(properties[name])
    kind.describe(schema)


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    null = {"type": "null"}
    if "anyOf" in schema:
        return schema if null in schema["anyOf"] else {**schema, "anyOf": [*schema["anyOf"], null]}
    if not schema.keys() & {"type", "$ref", "enum", "const"} or schema.get("type") == "null":
        return schema
    outside: dict[str, Any] = {name: schema[name] for name in ("title", "default") if name in schema}
    return {"anyOf": [{n: v for n, v in schema.items() if n not in outside}, null], **outside}


class Body(BaseModel):
    # forbid: for the schema
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_described)
    takes_more: ClassVar[bool] = False  # fields that are not known; with extra="allow"

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        """Adds to the schema what types do not tell."""

    @model_validator(mode="before")
    @classmethod
    def _without_inert(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        field_names = _fields(cls)
        acting = {}
        for name, value in values.items():
            known = cls.takes_more or name in field_names
            if not known and not _is_inert(name, value):
                # pydantic would go on and make a million errors of as many
                about = {"field": shown(name), "reason": not_built(name)}
                raise PydanticCustomError("not_built", "{reason}", about)
            if known and value is not None:
                acting[name] = value
        return acting


@cache
def _fields(kind: type[Body]) -> frozenset[str]:
    """Their names in a body. A chat asks for each of its messages."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _is_inert(name: str, value: Any) -> bool:
    if value is None:
        return name in INERT
    # True == 1, but a boolean is no number.
    return any(
        value == inert and isinstance(value, bool) == isinstance(inert, bool) for inert in INERT.get(name, ())
    )


# ---- a JSON schema with a name


class NamedSchema(Body):
    name: str = ""  # for the model's eyes, elsewhere
    description: str = ""
    strict: bool = True  # it always is
    schema_: Any = Field({}, alias="schema")


def json_text(schema: Any) -> str:
    """Nothing else runs while it is made, so a schema may have MAX_SCHEMA values."""
    if isinstance(schema, str):
        return schema
    check_num_values(schema, "the schema")
    return json.dumps(schema)


def check_num_values(value: Any, name: str) -> None:
    """Counts until it is too many."""
    if any(True for _ in islice(values_in(value), MAX_SCHEMA, None)):
        raise InvalidRequest(f"{name} has more than {MAX_SCHEMA} values")


def values_in(value: Any) -> Iterator[Any]:
    """Itself and, as they are asked for, all in it, however deep."""
    left = [iter((value,))]
    while left:
        for one in left[-1]:
            yield one
            if isinstance(one, dict | list | tuple):
                left.append(iter(one.values() if isinstance(one, dict) else one))
                break
        else:
            left.pop()


MAX_PROMPTS = 1024  # in one request
SAMPLED = frozenset(field.name for field in fields(SamplingParams))
Prompt = Annotated[str | TokenIds, fault("must be a text or a list of token ids")]


# ---- what the document of the API says beyond types


def describe_limits(schema: dict[str, Any]) -> None:
    """Those of SamplingParams, for the fields that have its names."""
    for name, field in schema["properties"].items():
        low, high = {**RANGES, **COUNTS}.get(name, (None, None))
        is_boolean = {"type": "boolean"} in field.get("anyOf", ())  # as a chat's logprobs are
        if low is not None and not is_boolean:
            field |= {"exclusiveMinimum" if name in ABOVE else "minimum": low, "maximum": high}


# ---- what the output must conform to


class ResponseFormat(Body):
    """OpenAI's, and what others' clients send: llama.cpp's a schema beside json_object, TGI's a value, which
    is a schema, alone or with a name, or an expression."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = None
    schema_: Any = Field(None, alias="schema")
    value: Any = None

    def constraint(self) -> StructuredOutputs | None:
        named, value = self.json_schema, self.value
        if isinstance(value, dict) and {"name", "schema"} <= value.keys():
            value = value["schema"]
        sources: tuple[Any, ...] = (named and named.schema_, self.schema_, value)
        given = [one for one in sources if one is not None]
        most = {"text": 0}.get(self.type, 1)
        least = {"json_object": 0}.get(self.type, most)
        if not least <= len(given) <= most or (named is not None and self.type != "json_schema"):
            raise InvalidRequest.at(
                "response_format", "type json_schema must have a json_schema, json_object may have a schema"
            )
        if self.type == "regex":
            return StructuredOutputs(regex=given[0])
        if given:
            return StructuredOutputs(json=json_text(given[0]))
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

    def constraint(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=None if self.json_ is None else json_text(self.json_),
            json_object=self.json_object,
            regex=self.regex,
            choice=tuple(self.choice or ()),
            grammar=self.grammar,
        )


# ---- requests


class EngineRequest(Body):
    """What requests of every kind have."""

    model: str = ""  # the one that there is, or an adapter; other names: see backend.adapter_of
    dynamic_lora: str = ""  # an adapter, whatever the model
    user: str = ""
    priority: Whole = 0
    cache_salt: str = ""


class Sampling(EngineRequest):
    """The fields of SamplingParams, whose defaults they have."""

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
    truncation_side: Literal["left", "right"] | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: Any = None
    guided_json_object: bool = False
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    json_schema: Any = None  # llama.cpp's names of guided_json and guided_grammar
    grammar: str | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        describe_limits(schema)

    def params(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Raises InvalidRequest for what is not allowed."""
        sampled = {**(defaults or {}), **self.sampled()}
        return SamplingParams(**sampled, structured_outputs=self._constraint())

    def sampled(self) -> dict[str, Any]:
        """Those of SamplingParams that were sent."""
        sent = (SAMPLED & self.model_fields_set) - {"structured_outputs"}
        return {name: getattr(self, name) for name in sent}

    def _constraint(self) -> StructuredOutputs | None:
        guided = {
            name.removeprefix("guided_"): getattr(self, name)
            for name in self.model_fields_set
            if name.startswith("guided_") and getattr(self, name) is not False
        }
        guided |= {"json": self.json_schema} if self.json_schema is not None else {}
        guided |= {"grammar": self.grammar} if self.grammar is not None else {}
        sources = (self.response_format, self.structured_outputs, Structured(**guided) if guided else None)
        constraints = [
            one for source in sources if source is not None and (one := source.constraint()) is not None
        ]
        if len(constraints) > 1:
            raise InvalidRequest.at(
                "structured_outputs", "give only one of response_format, structured_outputs and guided_*"
            )
        return constraints[0] if constraints else None


# ---- faults


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
    field = first.get("ctx", {}).get("field")  # where the fault was found before fields were looked at
    steps = first["loc"] if field is None else (*first["loc"], field)
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
