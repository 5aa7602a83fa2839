"""The bodies of TGI's routes, and what they mean to the engine. Names, limits and their words are TGI's."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import Field

from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams, StructuredOutputs
from hex_llm.server.common.body import Body, NamedSchema, Texts, Whole, describe_limits, json_text, parse

MAX_STOPS = 4
MAX_NEW_TOKENS = 100  # where a request does not say
MAX_SEED = 2**64
OURS_BY_THEIRS = {
    "inputs": "prompt",
    "max_new_tokens": "max_tokens",
    "truncate": "truncate_prompt_tokens",
    "grammar": "structured_outputs",
}
THEIRS_BY_OURS = {ours: theirs for theirs, ours in OURS_BY_THEIRS.items()}


class Grammar(Body):
    type: Literal["json", "json_object", "regex", "json_schema"]
    value: Any

    def constraint(self) -> StructuredOutputs:
        if self.type == "json_schema":
            return StructuredOutputs(json=json_text(parse(NamedSchema, self.value, "grammar.value.").schema_))
        if self.type == "regex":
            return StructuredOutputs(regex=self.value)
        if not isinstance(self.value, dict | str):
            raise InvalidRequest("grammar.value: must be a JSON schema, as an object or as a text", "grammar")
        return StructuredOutputs(json=json_text(self.value))


class Parameters(Body):
    best_of: Whole = 1
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: Whole | None = None
    return_full_text: bool | None = None
    stop: Texts = Field(default=[])
    truncate: Whole | None = None
    watermark: bool = False
    details: bool = False
    decoder_input_details: bool = False
    seed: Whole | None = None
    top_n_tokens: Whole = 0
    grammar: Grammar | None = None
    adapter_id: str | None = None

    @classmethod
    def describe(cls, schema: dict[str, Any]) -> None:
        describe_limits(schema)
        schema["properties"]["seed"] |= {"minimum": 0, "maximum": MAX_SEED - 1}
        schema["properties"]["max_new_tokens"]["minimum"] = 1
        schema["properties"]["truncate"]["minimum"] = 1
        schema["properties"]["top_n_tokens"] |= {"minimum": 0, "maximum": MAX_LOGPROBS}

    @property
    def samples(self) -> bool:
        """Who sends one of these means it, whether or not do_sample is there too."""
        options = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return self.do_sample or any(one is not None for one in options)

    def params(self, *, streamed: bool = False, max_tokens: int | None = MAX_NEW_TOKENS) -> SamplingParams:
        """Raises InvalidRequest. A seed is drawn where there is none, so that a reply can name it.

        `max_tokens` is for a request that does not say; None: as long as it gets.
        """
        self._check(streamed)
        given = {
            ours: value
            for ours in ("repetition_penalty", "frequency_penalty", "top_k", "top_p", "typical_p")
            if (value := getattr(self, ours)) is not None
        }
        with_logprobs = self.details or self.decoder_input_details or streamed or self.best_of > 1
        return SamplingParams(
            **given,
            n=self.best_of,
            temperature=self._temperature(),
            seed=_signed(secrets.randbits(53) if self.seed is None else self.seed),
            max_tokens=self.max_new_tokens or max_tokens,
            stop=tuple(self.stop),
            include_stop_str_in_output=True,  # TGI leaves them there
            logprobs=self.top_n_tokens if with_logprobs else None,
            prompt_logprobs=0 if self.decoder_input_details else None,
            truncate_prompt_tokens=self.truncate,
            structured_outputs=None if self.grammar is None else self.grammar.constraint(),
        )

    def _temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 1.0 if self.samples else 0.0

    def _check(self, streamed: bool) -> None:
        if self.watermark:
            raise InvalidRequest("`watermark` is not built", "watermark")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidRequest("`max_new_tokens` must be strictly positive", "max_new_tokens")
        if self.truncate is not None and self.truncate < 1:
            raise InvalidRequest(f"`truncate` must be strictly positive. Given: {self.truncate}", "truncate")
        if (num := len(self.stop)) > MAX_STOPS:
            raise InvalidRequest(f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {num}", "stop")
        if not 0 <= (num := self.top_n_tokens) <= MAX_LOGPROBS:
            limits = f">= 0 and <= {MAX_LOGPROBS}"
            raise InvalidRequest(f"`top_n_tokens` must be {limits}. Given: {num}", "top_n_tokens")
        if self.seed is not None and not 0 <= self.seed < MAX_SEED:
            raise InvalidRequest(f"`seed` must be >= 0 and < {MAX_SEED}", "seed")
        if fault := self._fault_of_best_of(streamed):
            raise InvalidRequest(fault, "best_of")
        if streamed and self.decoder_input_details:
            name = "decoder_input_details"
            raise InvalidRequest(f"`{name}` == true is not supported when streaming tokens", name)

    def _fault_of_best_of(self, streamed: bool) -> str:
        """Empty if there is none."""
        if not 0 < self.best_of <= MAX_CHOICES:
            return f"`best_of` must be > 0 and <= {MAX_CHOICES}. Given: {self.best_of}"
        if self.best_of == 1:
            return ""
        if not self.samples:
            return "you must use sampling when `best_of` is > 1"
        if self.seed is not None:
            return "`seed` must not be set when `best_of` > 1"
        return "`best_of` != 1 is not supported when streaming tokens" if streamed else ""


class GenerateRequest(Body):
    inputs: Annotated[str, Field(json_schema_extra={"minLength": 1})]
    # As in TGI, a request that says nothing at all samples; one with parameters says whether it does.
    parameters: Parameters = Parameters(do_sample=True)
    stream: bool = False


class TokenizeRequest(Body):
    inputs: str
    add_special_tokens: bool = True


def _signed(seed: int) -> int:
    """The same 64 bits in the range that SamplingParams takes."""
    return seed - MAX_SEED if seed >= MAX_SEED // 2 else seed


def in_their_words(problem: InvalidRequest) -> InvalidRequest:
    """A fault that the engine found, told by the name that the client knows."""
    theirs = THEIRS_BY_OURS.get(problem.param or "")
    if theirs is None:
        return problem
    return InvalidRequest(str(problem).replace(str(problem.param), theirs, 1), theirs)
