"""The fields of SamplingParams as bodies of every dialect have them."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import Field

from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import ABOVE, COUNTS, RANGES, SamplingParams, StructuredOutputs
from hex_llm.server.common.body import (
    Body,
    NamedSchema,
    OneOrMoreTexts,
    Texts,
    TokenIds,
    Whole,
    json_text,
    told,
)

MAX_PROMPTS = 1024  # in one request
SAMPLED = frozenset(field.name for field in fields(SamplingParams))
Prompt = Annotated[str | TokenIds, told("must be a text or a list of token ids")]


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
