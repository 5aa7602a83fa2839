"""The one door into an engine: a request is made here, with every field checked against the model.

What is wrong in itself SamplingParams has refused already. Nothing is allocated before all checks are done.
Both sides of the process border call this: the front end to answer at once, the engine because it trusts
nobody.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from operator import index
from typing import Any, SupportsIndex, Unpack

from hex_llm.errors import InvalidRequest
from hex_llm.sampling_params import MAX_INT, MAX_LOGPROBS, SamplingParams, is_unicode
from hex_llm.text.bad_words import bad_word_ids
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import Pooling, Request, RequestOptions

NO_POOLING = Pooling()
MAX_SALT = 4096  # characters
MAX_BAD_WORD_IDS = 4096  # tokens of all bad words, each with its ways to be written
MAX_ID = 256
MAX_LIKELIEST = 1 << 22  # tokens whose log-probabilities a reply tells besides the chosen ones


@dataclass(frozen=True)
class Limits:
    """What an engine can serve."""

    vocab_size: int  # the width of its logits
    max_len: int  # tokens of one sequence, by the model and the flags
    max_blocks: int  # KV blocks that one sequence could hold if it were alone
    block_size: int
    reads_text: bool  # it has a tokenizer, which structured output needs
    max_sequences: int = MAX_INT  # waiting and running
    eos_ids: tuple[int, ...] = ()
    allows_priority: bool = True
    pooling: Pooling = NO_POOLING
    generates: bool = True
    max_logprobs: int = MAX_LOGPROBS
    max_adapters: int = 0  # on the devices at a time; 0: requests have none

    @property
    def longest(self) -> int:
        """Tokens of one sequence that the model takes and the KV cache holds."""
        return min(self.max_len, self.max_blocks * self.block_size)


def make_request(
    request_id: str,
    prompt_ids: ListLike[int],
    params: SamplingParams,
    limits: Limits,
    tokenizer: Tokenizer | None = None,
    **options: Unpack[RequestOptions],
) -> Request:
    """Raises InvalidRequest, which names the field."""
    prompt_ids = _truncated(prompt_ids, params, limits)
    if -1 in (params.logprobs, params.prompt_logprobs):
        params = _with_vocabulary(params, limits.vocab_size)
    bad_words = _bad_word_ids(params, tokenizer)
    request = Request(request_id, prompt_ids, params, bad_word_ids=bad_words, **options)
    check_request(request, limits)
    return request


def _with_vocabulary(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """-1 log-probabilities are those of all tokens."""
    of_choice, of_prompt = params.logprobs, params.prompt_logprobs
    return replace(
        params,
        logprobs=vocab_size if of_choice == -1 else of_choice,
        prompt_logprobs=vocab_size if of_prompt == -1 else of_prompt,
    )


def max_len_of(request: Request, limits: Limits) -> int:
    """Tokens after which each of its sequences ends. Who names no max_tokens gets as many as fit."""
    most = request.params.max_tokens
    return limits.longest if most is None else min(limits.max_len, len(request.prompt_ids) + most)


def check_request(request: Request, limits: Limits) -> None:
    """JAX clamps an index out of range instead of failing, so this is the only guard."""
    params = request.params
    if params.pooling is not None and limits.pooling.problem:
        raise InvalidRequest(limits.pooling.problem, "model")
    if params.pooling is None and not limits.generates:
        raise InvalidRequest("this server generates nothing (--runner)", "model")
    if request.adapter is not None and not limits.max_adapters:
        raise InvalidRequest("adapters are off (--enable_lora)", "model")
    _check_prompt(request.prompt_ids, limits)
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    _check_ids("logprob_token_ids", params.logprob_token_ids, limits)
    _check_ids("logit_bias", params.logit_bias or (), limits)
    if sum(map(len, request.bad_word_ids)) > MAX_BAD_WORD_IDS:
        raise InvalidRequest.at("bad_words", f"more than {MAX_BAD_WORD_IDS} tokens in all")
    for ids in request.bad_word_ids:
        if not ids:
            raise InvalidRequest.at("bad_words", "a word without tokens")
        _check_ids("bad_words", ids, limits)
    _check_masks(request, limits)
    max_len = max_len_of(request, limits)
    if params.min_tokens > max_len - len(request.prompt_ids):
        raise InvalidRequest.at(
            "min_tokens",
            f"{params.min_tokens} do not fit: the prompt has {len(request.prompt_ids)} tokens, "
            f"prompt and output together may have {max_len}",
        )
    _check_blocks(max_len, limits)
    _check_logprobs(request, max_len, limits.max_logprobs)
    if params.structured_outputs is not None and not limits.reads_text:
        raise InvalidRequest.at("structured_outputs", "this server has no tokenizer")
    if not _is_whole(request.priority) or abs(request.priority) > MAX_INT:
        raise InvalidRequest.at("priority", f"must be a whole number from {-MAX_INT} to {MAX_INT}")
    if request.priority and not limits.allows_priority:
        raise InvalidRequest.at("priority", "this server takes none (--allow_priority)")
    salt = request.cache_salt
    if not isinstance(salt, str) or len(salt) > MAX_SALT or not is_unicode(salt):
        raise InvalidRequest.at("cache_salt", f"must be a text of at most {MAX_SALT} characters")
    if not isinstance(request.request_id, str) or not 0 < len(request.request_id) <= MAX_ID:
        raise InvalidRequest.at("request_id", f"must be a text of 1 to {MAX_ID} characters")


def _truncated(prompt_ids: ListLike[int], params: SamplingParams, limits: Limits) -> list[int]:
    """Its end or beginning, if only that is wanted; room for one token of output is always left."""
    most = params.truncate_prompt_tokens
    if most is None:
        # Before a copy is made: a prompt may have any length.
        _check_length(prompt_ids, limits)
        return _plain(prompt_ids)
    room = limits.longest - (params.max_tokens or 1) if most == -1 else most
    if most > limits.longest - 1:
        raise InvalidRequest.at(
            "truncate_prompt_tokens", f"{most} is more than a prompt may have, {limits.longest - 1}"
        )
    kept = max(room, 1)
    return _plain(prompt_ids[:kept] if params.truncation_side == "right" else prompt_ids[-kept:])


def _plain(prompt_ids: ListLike[Any]) -> list[int]:
    """Whole numbers of other libraries as our own; what is none stays as it is, to be refused."""
    if set(map(type, prompt_ids)) == {int}:
        return list(prompt_ids)
    return [
        i if type(i) is int or isinstance(i, bool) or not isinstance(i, SupportsIndex) else index(i)
        for i in prompt_ids
    ]


def _check_prompt(prompt_ids: ListLike[int], limits: Limits) -> None:
    if len(prompt_ids) == 0:
        raise InvalidRequest("the prompt is empty", "prompt")
    _check_length(prompt_ids, limits)
    _check_ids("prompt", prompt_ids, limits)


def _check_length(prompt_ids: ListLike[int], limits: Limits) -> None:
    if len(prompt_ids) >= limits.longest:
        raise InvalidRequest(
            f"the prompt has {len(prompt_ids)} tokens; prompt and output together may have {limits.longest}",
            "prompt",
        )


def _check_blocks(max_len: int, limits: Limits) -> None:
    needed = -(-max_len // limits.block_size)
    if needed > limits.max_blocks:
        raise InvalidRequest(
            f"prompt and max_tokens need {needed} KV blocks of {limits.block_size} tokens, but there are "
            f"only {limits.max_blocks}: lower max_tokens or raise --num_blocks",
            "max_tokens",
        )


def _check_logprobs(request: Request, max_len: int, most: int) -> None:
    """Of all choices together: a reply holds them all, and repeats the prompt's for each."""
    params, num_prompt = request.params, len(request.prompt_ids)
    for name, num_tokens in {"logprobs": max_len - num_prompt, "prompt_logprobs": num_prompt}.items():
        num_top = getattr(params, name) or 0
        if num_top > most:
            raise InvalidRequest.at(name, f"more than {most} are not told here (--max_logprobs)")
        num_labels = len(params.logprob_token_ids) if name == "logprobs" else 0
        if max(num_top, num_labels) * num_tokens * params.num_choices > MAX_LIKELIEST:
            raise InvalidRequest.at(
                name,
                f"more than {MAX_LIKELIEST} in all, for {num_tokens} tokens of {params.num_choices} choices",
            )


def _check_ids(name: str, token_ids: Collection[Any], limits: Limits) -> None:
    # There may be a million of them, nearly always plain numbers: these are checked in few passes.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < limits.vocab_size:
        return
    for token_id in token_ids:
        if not _is_whole(token_id) or not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest.at(
                name,
                f"token id {token_id!r:.40} is out of vocabulary: not a whole number from 0 to "
                f"{limits.vocab_size - 1}, for there are {limits.vocab_size}",
            )


def _check_masks(request: Request, limits: Limits) -> None:
    """Some token must be left to choose; what a grammar or longer bad words leave, only the engine sees."""
    params, allowed = request.params, request.params.allowed_token_ids
    forbidden = {ids[0] for ids in request.bad_word_ids if len(ids) == 1}
    # A text that is complete by its grammar may end before min_tokens.
    if params.min_tokens > 0 and params.structured_outputs is None:
        forbidden |= {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_ids)}
    if len(forbidden) < limits.vocab_size if allowed is None else any(i not in forbidden for i in allowed):
        return
    name = "bad_words" if allowed is None else "allowed_token_ids"
    raise InvalidRequest.at(name, "every token is a bad word or would end the output before min_tokens")


def narrowing_field(request: Request) -> str | None:
    """The one to blame if the engine finds no token to choose; None: the request allows all of them."""
    params = request.params
    names = ("structured_outputs", "allowed_token_ids", "bad_words")
    limited = (params.structured_outputs, params.allowed_token_ids, request.bad_word_ids)
    return next((name for name, value in zip(names, limited, strict=True) if value), None)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_word_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Also refuses what cannot be done without a tokenizer."""
    if tokenizer is not None:
        return [ids for word in params.bad_words for ids in bad_word_ids(tokenizer, word)]
    for name in ("stop", "bad_words", "structured_outputs"):
        if getattr(params, name):
            raise InvalidRequest.at(name, "this server has no tokenizer (--skip_tokenizer_init)")
    return []
