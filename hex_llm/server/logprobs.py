"""Log-probabilities in the shapes of OpenAI's APIs and of vLLM. JSON has no infinities: they are -9999."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import CompletionOutput, Logprob, Logprobs, RequestOutput

LEAST = -9999.0


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # NaN is not greater either


def of_completion(
    tokenizer: Tokenizer | None, request: RequestOutput, choice: CompletionOutput, *, skip_special: bool
) -> dict[str, Any] | None:
    """The older shape. It begins with the prompt's where the text does."""
    if choice.logprobs is None:
        return None
    echoed = len(choice.logprobs) > len(choice.token_ids)
    ids = [*request.prompt_token_ids, *choice.token_ids] if echoed else choice.token_ids
    known = [logprobs.get(i) for i, logprobs in zip(ids, choice.logprobs, strict=True)]
    return {
        "tokens": [_name(i, tokenizer) for i in ids],
        "token_logprobs": [None if one is None else finite(one.logprob) for one in known],
        "top_logprobs": [_by_name(one) or None for one in choice.logprobs],
        "text_offset": _offsets(tokenizer, ids, choice.text, skip_special),
    }


def of_chat(tokenizer: Tokenizer, choice: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    if choice.logprobs is None:
        return None
    content = []
    for token_id, known in zip(choice.token_ids, choice.logprobs, strict=True):
        likeliest = sorted(known.items(), key=lambda item: item[1].rank)[:num_top]
        top = [_entry(tokenizer, i, one) for i, one in likeliest]
        content.append({**_entry(tokenizer, token_id, known[token_id]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_prompt(request: RequestOutput) -> list[dict[int, dict[str, Any]] | None] | None:
    if request.prompt_logprobs is None:
        return None
    return [
        None
        if known is None
        else {i: {**vars(one), "logprob": finite(one.logprob)} for i, one in known.items()}
        for known in request.prompt_logprobs
    ]


def _entry(tokenizer: Tokenizer, token_id: int, one: Logprob) -> dict[str, Any]:
    data = tokenizer.codec.token_bytes(token_id, False)
    return {"token": one.decoded_token, "logprob": finite(one.logprob), "bytes": list(data)}


def _by_name(known: Logprobs) -> dict[str, float]:
    """Of tokens that look alike, the likeliest."""
    found: dict[str, float] = {}
    for token_id, one in sorted(known.items(), key=lambda item: item[1].rank):
        found.setdefault(one.decoded_token or f"token_id:{token_id}", finite(one.logprob))
    return found


def _name(token_id: int, tokenizer: Tokenizer | None) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.shown(token_id)


def _offsets(tokenizer: Tokenizer | None, ids: Sequence[int], text: str, skip_special: bool) -> list[int]:
    """Where in the text each token begins; one that it does not show stands where it would."""
    offsets, position = [], 0
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    for token_id in ids:
        offsets.append(min(position, len(text)))
        if tokenizer is not None:
            piece = utf8.decode(tokenizer.codec.token_bytes(token_id, skip_special))
            if position == 0 and not text.startswith(piece):  # a text does not begin with the codec's space
                piece = piece.removeprefix(tokenizer.codec.prefix)
            position += len(piece)
    return offsets
