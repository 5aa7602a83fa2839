"""Log-probabilities in the shapes of OpenAI's APIs and of vLLM. JSON has no infinities: they are -9999.

There may be millions: each is shaped when it is encoded.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from hex_llm.frontend.outputs import Delta
from hex_llm.sampling_params import MAX_INT
from hex_llm.server.common.encoding import Listed
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, Logprob, Logprobs, RequestOutput

LEAST = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # NaN is not greater either


class CompletionLogprobs:
    """Those of one choice in the older shape, as it grows; with the prompt's first, where the text has it."""

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special: bool, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._as_ids = as_ids or tokenizer is None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = 0

    def add(self, ids: Sequence[int], known: Sequence[Logprobs], text: str, *, ended: bool) -> dict[str, Any]:
        """Of `ids`, with what is known of each; `text` is all that the choice has shown so far."""
        ones = (logprobs.get(i) for i, logprobs in zip(ids, known, strict=True))
        return {
            "tokens": Listed(self._name(i) for i in ids),
            "token_logprobs": Listed(None if one is None else finite(one.logprob) for one in ones),
            "top_logprobs": Listed(self._by_name(one) or None for one in known),
            "text_offset": Listed(min(self._offset(i, text), len(text) if ended else MAX_INT) for i in ids),
        }

    def _offset(self, token_id: int, text: str) -> int:
        """Where in the text the token begins; one that it does not show stands where it would."""
        offset = self._position
        if self._tokenizer is not None:
            piece = self._utf8.decode(self._tokenizer.codec.token_bytes(token_id, self._skip_special))
            if offset == 0 and not piece.startswith(text[: len(piece)]):
                piece = piece.removeprefix(self._tokenizer.codec.prefix)  # with which no text begins
            self._position += len(piece)
        return offset

    def _name(self, token_id: int) -> str:
        return (
            _id_name(token_id) if self._as_ids or self._tokenizer is None else self._tokenizer.shown(token_id)
        )

    def _by_name(self, known: Logprobs) -> dict[str, float]:
        """Of tokens that look alike, the likeliest."""
        found: dict[str, float] = {}
        for token_id, one in sorted(known.items(), key=_rank):
            name = None if self._as_ids else one.decoded_token
            found.setdefault(name or _id_name(token_id), finite(one.logprob))
        return found


def of_completion(
    tokenizer: Tokenizer | None,
    request: RequestOutput,
    choice: CompletionOutput,
    *,
    skip_special: bool,
    as_ids: bool = False,
) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    echoed = len(choice.logprobs) > len(choice.token_ids)
    ids = [*request.prompt_token_ids, *choice.token_ids] if echoed else choice.token_ids
    shape = CompletionLogprobs(tokenizer, skip_special=skip_special, as_ids=as_ids)
    return shape.add(ids, choice.logprobs, choice.text, ended=True)


def of_chat(
    tokenizer: Tokenizer,
    choice: CompletionOutput | Delta,
    num_top: int,
    *,
    as_ids: bool = False,
) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    return {"content": Listed(_entries(tokenizer, choice, num_top, as_ids)), "refusal": None}


def _entries(
    tokenizer: Tokenizer, choice: CompletionOutput | Delta, num_top: int, as_ids: bool
) -> Iterator[dict[str, Any]]:
    for token_id, known in zip(choice.token_ids, choice.logprobs or (), strict=True):
        likeliest = sorted(known.items(), key=_rank)[:num_top]
        top = [_entry(tokenizer, i, one, as_ids) for i, one in likeliest]
        yield {**_entry(tokenizer, token_id, known[token_id], as_ids), "top_logprobs": top}


def _rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank


def of_prompt(request: RequestOutput) -> Listed | None:
    if request.prompt_logprobs is None:
        return None
    return Listed(
        None
        if known is None
        else {i: {**vars(one), "logprob": finite(one.logprob)} for i, one in known.items()}
        for known in request.prompt_logprobs
    )


def _entry(tokenizer: Tokenizer, token_id: int, one: Logprob, as_ids: bool) -> dict[str, Any]:
    name = _id_name(token_id) if as_ids else one.decoded_token
    return {"token": name, "logprob": finite(one.logprob), "bytes": tokenizer.byte_values[token_id]}


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"
