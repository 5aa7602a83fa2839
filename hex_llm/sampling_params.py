"""How one request's tokens are chosen: plain data that checks itself, whoever makes it.

Every field is checked here for its type and range, so a value that could harm a step never exists; what also
depends on the model (token ids, lengths) is checked where requests enter the engine. Names are vLLM's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hex_llm.errors import InvalidRequest, one_line

MAX_INT = 2**31 - 1
MAX_CHOICES = 128  # n and best_of
MAX_LOGPROBS = 20  # likeliest tokens that a step tells; to tell more takes a program of its own
MAX_LABELS = 128  # logprob_token_ids
MAX_STOPS = 64  # stop strings, and bad words
MAX_TOKEN_IDS = 1024  # stop_token_ids, and entries of logit_bias
MAX_TEXT = 1 << 16  # characters of one stop string, choice or salt
MAX_BAD_WORD = 1 << 10  # characters
MAX_GRAMMAR = 1 << 20  # characters of a schema, expression or grammar


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the output must conform to: exactly one of these, behind reasoning if that may come first."""

    json: str | None = None  # a JSON schema, as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: tuple[str, ...] = ()  # one of these texts
    grammar: str | None = None  # Lark, or EBNF with `::=`
    reasoning: tuple[str, ...] = ()  # the tags around it, or only the end's: then it has begun

    def __post_init__(self) -> None:
        for name, most in {"choice": 1024, "reasoning": 2}.items():
            texts = _items(getattr(self, name), f"structured_outputs.{name}", most)
            for text in texts:
                _check_text(f"structured_outputs.{name}", text)
            object.__setattr__(self, name, texts)
        for name in ("json", "regex", "grammar"):
            text = getattr(self, name)
            if text is not None:
                _check_text(f"structured_outputs.{name}", text, MAX_GRAMMAR)
        if not isinstance(self.json_object, bool):
            raise _refused("structured_outputs.json_object", self.json_object, "true or false")
        given = (self.json is not None, self.json_object, self.regex is not None, bool(self.choice))
        if sum((*given, self.grammar is not None)) != 1:
            raise InvalidRequest.at(
                "structured_outputs", "exactly one of json, json_object, regex, choice, grammar must be given"
            )


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends. InvalidRequest names a bad field.

    SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256, stop=("###",), seed=1)
    """

    n: int = 1
    best_of: int | None = None  # choices made, of which the n likeliest are returned; None: n
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: drawn from the server's
    max_tokens: int | None = 16  # None: up to the model's length limit
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None  # of the chosen token and of that many likeliest; -1: of all
    logprob_token_ids: tuple[int, ...] = ()  # of these instead of the likeliest
    prompt_logprobs: int | None = None
    echo: bool = False  # the output begins with the prompt
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # to keep of the prompt; -1: as many as the model takes
    truncation_side: str = "left"  # where the others are cut off
    structured_outputs: StructuredOutputs | None = None
    pooling: str | None = None  # a vector of the prompt is wanted, too: one of POOLINGS

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        for name, (low, high) in COUNTS.items():
            _check_count(name, getattr(self, name), low, high, optional=name in OPTIONAL)
        for name in ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "true or false")
        self._check_texts()
        self._check_token_ids()
        self._check_together()

    @property
    def num_choices(self) -> int:
        """Sequences that are generated."""
        return max(self.n, self.best_of or 0)

    def _check_texts(self) -> None:
        for name, most in {"stop": MAX_TEXT, "bad_words": MAX_BAD_WORD}.items():
            value = getattr(self, name)
            texts = _items((value,) if isinstance(value, str) else value, name, MAX_STOPS)
            for text in texts:
                _check_text(name, text, most)
            object.__setattr__(self, name, texts)

    def _check_token_ids(self) -> None:
        limits = {"stop_token_ids": MAX_TOKEN_IDS, "allowed_token_ids": MAX_INT}
        limits["logprob_token_ids"] = MAX_LABELS
        for name, most in limits.items():
            if (value := getattr(self, name)) is not None:
                ids = _items(value, name, most)
                for token_id in ids:
                    _check_count(name, token_id, 0, MAX_INT)
                object.__setattr__(self, name, ids)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest.at("allowed_token_ids", "must not be empty")
        if self.logprob_token_ids and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    def _check_together(self) -> None:
        if self.truncation_side not in ("left", "right"):
            raise _refused("truncation_side", self.truncation_side, "left or right")
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise _refused("structured_outputs", self.structured_outputs, "StructuredOutputs")
        if self.pooling not in (None, *POOLINGS):
            raise _refused("pooling", self.pooling, f"one of {', '.join(POOLINGS)}")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest.at("best_of", f"{self.best_of} is less than n, {self.n}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest.at(
                "min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            )


# Hidden states: the last, their mean, the first; or log-probabilities of allowed_token_ids behind the prompt.
POOLINGS = ("last", "mean", "cls", "tokens")
RANGES = {  # floats, both ends included
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 100.0),
}
ABOVE = ("top_p", "typical_p", "repetition_penalty")  # must lie above the lower end
COUNTS = {
    "n": (1, MAX_CHOICES),
    "best_of": (1, MAX_CHOICES),
    "top_k": (-1, MAX_INT),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, MAX_INT),
    "min_tokens": (0, MAX_INT),
    "logprobs": (-1, MAX_INT),
    "prompt_logprobs": (-1, MAX_INT),
    "truncate_prompt_tokens": (-1, MAX_INT),
}
OPTIONAL = ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
MAX_BIAS = 100.0


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (low <= value <= high) or (name in ABOVE and value == low):
        allowed = f"a number above {low:g} and at most" if name in ABOVE else f"a number from {low:g} to"
        raise _refused(name, value, f"{allowed} {high:g}")


def _check_count(name: str, value: Any, low: int, high: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refused(name, value, f"a whole number from {low} to {high}")
    if not low <= value <= high:  # with pydantic's name of the fault, which clients of vLLM look for
        kind = "greater_than_equal" if value < low else "less_than_equal"
        raise _refused(name, value, f"a whole number from {low} to {high} ({kind})")
    if name == "truncate_prompt_tokens" and value == 0:
        raise _refused(name, value, "-1 or a whole number above 0")


def _items(value: Any, name: str, most: int) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or len(value) > most:
        raise _refused(
            name, len(value) if isinstance(value, list | tuple) else value, f"a list of at most {most}"
        )
    return tuple(value)


def is_unicode(text: str) -> bool:
    """Half of a surrogate pair is no character: it can be neither tokenized nor sent."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_text(name: str, value: Any, most: int = MAX_TEXT) -> None:
    if not isinstance(value, str) or not value or len(value) > most:
        raise _refused(name, value, f"a text of 1 to {most} characters")
    if not is_unicode(value):
        raise _refused(name, value, "a text without half surrogate pairs")


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping) or len(bias) > MAX_TOKEN_IDS:
        raise _refused("logit_bias", bias, f"an object of at most {MAX_TOKEN_IDS} token ids")
    wrong = [one for one in bias if isinstance(one, str) and not re.fullmatch("[0-9]{1,10}", one)]
    if wrong:
        raise _refused("logit_bias", ", ".join(wrong[:8]), "an object of token ids")
    checked = {}
    for token_id, value in bias.items():
        if isinstance(token_id, str):
            token_id = int(token_id)  # JSON's keys are texts
        _check_count("logit_bias", token_id, 0, MAX_INT)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _refused(f"logit_bias.{token_id}", value, "numbers")
        checked[token_id] = min(max(float(value), -MAX_BIAS), MAX_BIAS)
    return checked


def _refused(name: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: must be {allowed}, not {_shown(value)}", name.partition(".")[0])


def _shown(value: Any) -> str:
    """For a message: short, on one line, and whatever its size soon made."""
    if isinstance(value, str):
        return one_line(value[:80])[:80]
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:80] if isinstance(value, int | float | None) else f"a {type(value).__name__}"
