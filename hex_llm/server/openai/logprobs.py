"""Log-probabilities in the shapes of OpenAI's APIs and of vLLM. JSON has no infinities: they are -9999.

There may be millions: each is shaped when it is encoded.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from hex_llm.frontend.outputs import Delta
from hex_llm.sampling_params import MAX_INT
from hex_llm.server.common.replies import Listed
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

    def add(
        self, ids: Sequence[int], each: Sequence[Logprobs], text: str, *, ended: bool, num_echoed: int = 0
    ) -> dict[str, Any]:
        """Of `ids`, with the candidates for each; `text` is all that the choice has shown so far. Of the
        prompt's, which are the first `num_echoed`, it shows special tokens too."""
        ones = (candidates.get(i) for i, candidates in zip(ids, each, strict=True))
        most = len(text) if ended else MAX_INT
        offsets = (self._offset(i, text, number < num_echoed) for number, i in enumerate(ids))
        return {
            "tokens": Listed(self._name(i) for i in ids),
            "token_logprobs": Listed(None if one is None else finite(one.logprob) for one in ones),
            "top_logprobs": Listed(self._by_name(one) or None for one in each),
            "text_offset": Listed(min(offset, most) for offset in offsets),
        }

    def _offset(self, token_id: int, text: str, is_echoed: bool) -> int:
        """Where in the text the token begins; one that it does not show stands where it would."""
        offset = self._position
        if self._tokenizer is not None:
            skip = self._skip_special and not is_echoed
            piece = self._utf8.decode(self._tokenizer.codec.token_bytes(token_id, skip))
            if offset == 0 and not piece.startswith(text[: len(piece)]):
                piece = piece.removeprefix(self._tokenizer.codec.prefix)  # with which no text begins
            self._position += len(piece)
        return offset

    def _name(self, token_id: int) -> str:
        if self._as_ids or self._tokenizer is None:
            return _id_name(token_id)
        return self._tokenizer.shown(token_id)

    def _by_name(self, candidates: Logprobs) -> dict[str, float]:
        """The chosen one first, as vLLM has it. Of tokens that look alike, the first."""
        by_name: dict[str, float] = {}
        for token_id, one in candidates.items():
            name = None if self._as_ids else one.decoded_token
            by_name.setdefault(name or _id_name(token_id), finite(one.logprob))
        return by_name


def of_completion(
    tokenizer: Tokenizer | None,
    request: RequestOutput,
    choice: CompletionOutput,
    *,
    skip_special: bool,
    as_ids: bool = False,
    written: bool = True,
) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    echoed = len(choice.logprobs) > len(choice.token_ids)
    ids = [*request.prompt_token_ids, *choice.token_ids] if echoed else choice.token_ids
    shape = CompletionLogprobs(tokenizer, skip_special=skip_special, as_ids=as_ids)
    num_echoed = 0 if written and request.prompt is not None else len(ids) - len(choice.token_ids)
    return shape.add(ids, choice.logprobs, choice.text, ended=True, num_echoed=num_echoed)


def of_chat(
    tokenizer: Tokenizer, choice: CompletionOutput | Delta, num_top: int | None, *, as_ids: bool
) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        name = _id_name(token_id) if as_ids else one.decoded_token
        return {"token": name, "logprob": finite(one.logprob), "bytes": tokenizer.byte_values[token_id]}

    def entry_with_top(token_id: int, candidates: Logprobs) -> dict[str, Any]:
        top = [entry(*item) for item in sorted(candidates.items(), key=_rank)[:num_top]]
        return {**entry(token_id, candidates[token_id]), "top_logprobs": top}

    pairs = zip(choice.token_ids, choice.logprobs, strict=True)
    return {"content": Listed(entry_with_top(*pair) for pair in pairs), "refusal": None}


def _rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank


def of_prompt(request: RequestOutput) -> Listed | None:
    if request.prompt_logprobs is None:
        return None
    return Listed(
        None
        if candidates is None
        else {i: {**vars(one), "logprob": finite(one.logprob)} for i, one in candidates.items()}
        for candidates in request.prompt_logprobs
    )


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"
