"""From an engine's updates to what the user gets: text, log-probabilities, the ends of choices.

Both fronts use it, `LLM` and the client of an engine process, so they give the same answers. No jax; knows
neither how updates arrive nor who reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import msgspec

from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull, UnknownModel
from hex_llm.text.detokenize import Detokenizer
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Logprobs,
    Request,
    RequestOutput,
    TokenLogprobs,
    Update,
)


class Delta(msgspec.Struct):
    """What is new in one choice since it was last asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[Logprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str
    error_param: str | None
    error_kind: str


class Named(Sequence[Logprobs]):
    """Log-probabilities of tokens, with names: made when they are looked at, and not kept, for they are many
    times as large as what the engine told. Of a token that it told nothing of, `unknown`."""

    def __init__(
        self,
        ids: Sequence[int],
        token_logprobs: Sequence[TokenLogprobs | None],
        num_top: int,
        tokenizer: Tokenizer | None,
        unknown: Any = None,
    ) -> None:
        num = min(len(ids), len(token_logprobs))
        self._ids, self._logprobs = ids[:num], token_logprobs[:num]
        self._num_top = num_top
        self._tokenizer = tokenizer
        self._unknown = unknown

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def size(self) -> int:
        """Of all tokens together."""
        return sum(1 + min(len(one.top_ids), self._num_top) for one in self._logprobs if one is not None)

    @overload
    def __getitem__(self, place: int) -> Logprobs: ...
    @overload
    def __getitem__(self, place: slice) -> list[Logprobs]: ...
    def __getitem__(self, place: int | slice) -> Logprobs | list[Logprobs]:
        if isinstance(place, slice):
            return list(self)[place]
        return self._of(self._ids[place], self._logprobs[place])

    def __iter__(self) -> Iterator[Logprobs]:
        return map(self._of, self._ids, self._logprobs)

    def __add__(self, other: Named) -> Named:
        ids, token_logprobs = [*self._ids, *other._ids], [*self._logprobs, *other._logprobs]
        num_top = max(self._num_top, other._num_top)
        return Named(ids, token_logprobs, num_top, self._tokenizer, self._unknown)

    def _of(self, token_id: int, token: TokenLogprobs | None) -> Logprobs:
        if token is None:
            unknown: Logprobs = self._unknown
            return unknown
        top = zip(token.top_ids[: self._num_top], token.top_logprobs[: self._num_top], strict=True)
        likeliest = {i: Logprob(value, rank, self._name(i)) for rank, (i, value) in enumerate(top, 1)}
        return {token_id: Logprob(token.logprob, token.rank, self._name(token_id)), **likeliest}

    def _name(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.shown(token_id)


def raise_failure(choice: CompletionOutput | Delta) -> None:
    """A fault of the request may show only when the engine is at it, as one in a grammar does."""
    if choice.finish_reason is FinishReason.ERROR:
        if choice.error_kind == QueueFull.__name__:
            raise QueueFull(choice.error)
        if choice.error_kind == EngineStopped.__name__:
            raise EngineStopped(choice.error)
        if choice.error_param is None:
            raise HexError(choice.error)
        is_unknown = choice.error_kind == UnknownModel.__name__
        raise (UnknownModel if is_unknown else InvalidRequest)(choice.error, choice.error_param)


def for_engine(request: Request) -> Request:
    """What an engine must be asked for, that the request's output can be put together.

    The likeliest choices are known by their log-probabilities; an echo shows those of the prompt too.
    """
    params = request.params
    if params.logprobs is None and params.num_choices > params.n:
        params = replace(params, logprobs=0)
    elif params.logprobs is not None and params.echo:
        params = replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))
    return replace(request, params=params)


class OutputCollector:
    """One request's output while it grows. `request` is the user's; the engine gets `for_engine(request)`.

    The token that ends a choice is one of its token ids, but no part of its text unless the user wants stop
    strings there too. Where a stop string ends a choice, so does the token that completed it.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, prompt: str | None = None) -> None:
        """`prompt` is the text, where there was one; an echo of ids, or of a part of the text, is decoded."""
        self.request = request
        self.prompt = prompt
        self.num_cached = self._num_published = 0
        self.pooled = b""
        self._tokenizer = tokenizer
        params = request.params
        echoed = [self._prompt_text()] if params.echo else []
        self._choices = [
            _Choice(i, Detokenizer(tokenizer, params, request.prompt_ids) if tokenizer else None, [*echoed])
            for i in range(params.num_choices)
        ]
        self._num_open = len(self._choices)
        self._prompt_logprobs: list[TokenLogprobs] = []

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    @property
    def num_cache_creation(self) -> int:
        return max(min(self._num_published, len(self.request.prompt_ids)) - self.num_cached, 0)

    def add(self, update: Update) -> bool:
        """Whether a stop string ended the choice: the engine, which sees no text, must be told to stop it.

        What comes for a choice that has ended is ignored.
        """
        choice = self._choices[update.index]
        if choice.finish_reason is not None:
            return False
        if update.num_cached > self.num_cached:
            self.num_cached = update.num_cached
        if update.num_published > self._num_published:
            self._num_published = update.num_published
        self.pooled = update.pooled or self.pooled
        if update.prompt_logprobs:
            self._prompt_logprobs += update.prompt_logprobs
        if not choice.add(update, self.request.params.include_stop_str_in_output):
            return False
        self._num_open -= 1
        return update.finish_reason is None

    def deltas(self) -> list[Delta]:
        """What is new in each choice since the last call, all of it, however much that is; maybe nothing.

        An echo's text comes first. All choices are told, also where only the likeliest are wanted.
        """
        name = None if self.request.params.logprobs is None else self._named_of_choice
        return [delta for choice in self._choices if (delta := choice.take_news(name)) is not None]

    def output(self, *, named_late: bool = False) -> RequestOutput:
        """Everything so far. Where more choices were made than are wanted, the likeliest per token.

        `named_late`: log-probabilities are `Named`, which takes no time now, instead of lists.
        """
        listed: Callable[[Named], Any] = (lambda named: named) if named_late else list
        params = self.request.params
        choices = self._choices
        if len(choices) > params.n:
            choices = sorted(choices, key=_Choice.likelihood, reverse=True)[: params.n]
        num_top = params.prompt_logprobs
        return RequestOutput(
            self.request.request_id,
            self.request.prompt_ids,
            [self._completion(i, choice, listed) for i, choice in enumerate(choices)],
            self.prompt,
            None if num_top is None else listed(self.prompt_logprobs(num_top)),
            self.num_cached,
            self.finished,
            self.pooled,
            self.num_cache_creation,
        )

    def prompt_logprobs(self, num_top: int, unknown: Any = None) -> Named:
        """One for each token of the prompt, as far as they have come; nothing precedes the first."""
        token_logprobs = [None, *self._prompt_logprobs]
        return Named(self.request.prompt_ids, token_logprobs, num_top, self._tokenizer, unknown)

    def _completion(
        self, index: int, choice: _Choice, listed: Callable[[Named], list[Logprobs]]
    ) -> CompletionOutput:
        params = self.request.params
        logprobs = None  # unless the user asked for them, even if the engine was
        if params.logprobs is not None:
            named = self._named_of_choice(choice.token_ids, choice.logprobs)
            logprobs = listed(self.prompt_logprobs(params.logprobs, {}) + named if params.echo else named)
        return CompletionOutput(
            index,
            list(choice.token_ids),
            "".join(choice.pieces),
            choice.finish_reason,
            choice.stop_reason,
            choice.cumulative_logprob if choice.logprobs else None,
            logprobs,
            *choice.failure,
        )

    @property
    def decodes_prompt(self) -> bool:
        """An echo does not show it as it was written, but with all special tokens."""
        return self.prompt is None or self.request.params.truncate_prompt_tokens is not None

    def _prompt_text(self) -> str:
        if self._tokenizer is None or not self.decodes_prompt:
            return self.prompt or ""
        return self._tokenizer.decode(self.request.prompt_ids, skip_special_tokens=False)

    def _named_of_choice(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> Named:
        params = self.request.params
        num_top = max(params.logprobs or 0, len(params.logprob_token_ids))
        return Named(token_ids, logprobs, num_top, self._tokenizer)


@dataclass(eq=False, slots=True)
class _Choice:
    index: int
    detokenizer: Detokenizer | None
    pieces: list[str] = field(default_factory=list)  # of text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    failure: tuple[str, str | None, str] = ("", None, "")  # the update's error, param and kind
    # What a reader of deltas has got:
    num_told: int = 0  # tokens
    num_pieces_told: int = 0
    end_is_told: bool = False

    def add(self, update: Update, include_stop: bool) -> bool:
        """Whether it has ended. If its text is unavailable, nothing has come, no end either."""
        text_ids, ended, detokenizer = update.token_ids, update.finish_reason is not None, self.detokenizer
        # Stopped by the engine with a token, it is that token; stopped otherwise, there is none.
        if update.finish_reason is FinishReason.STOP and not include_stop:
            text_ids = text_ids[:-1]
        if detokenizer is not None and (text := detokenizer.add(text_ids, ended=ended)):
            self.pieces.append(text)
        self.token_ids += update.token_ids
        if update.logprobs:
            self.logprobs += update.logprobs
        if ended:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_token_id
            self.failure = update.error, update.param, update.kind
        if detokenizer is not None and detokenizer.stopped_by is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, detokenizer.stopped_by
            del self.token_ids[detokenizer.num_tokens :]
            del self.logprobs[detokenizer.num_tokens :]
            return True
        return ended

    @property
    def cumulative_logprob(self) -> float:
        return sum(one.logprob for one in self.logprobs)

    def likelihood(self) -> float:
        """For comparing with others: that of its mean token; one that failed is the last."""
        failed = self.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        return -math.inf if failed or not self.logprobs else self.cumulative_logprob / len(self.logprobs)

    def take_news(
        self, name: Callable[[list[int], list[TokenLogprobs]], Sequence[Logprobs]] | None
    ) -> Delta | None:
        """What is new since the last call, if anything is; `name` makes the log-probabilities, if wanted."""
        start, first, ended = self.num_told, self.num_pieces_told, self.finish_reason is not None
        num_tokens, num_pieces = len(self.token_ids), len(self.pieces)
        if start == num_tokens and first == num_pieces and (self.end_is_told or not ended):
            return None
        self.num_told, self.num_pieces_told, self.end_is_told = num_tokens, num_pieces, ended
        text = self.pieces[first] if num_pieces - first == 1 else "".join(self.pieces[first:])
        ids = self.token_ids[start:]
        logprobs = None if name is None else name(ids, self.logprobs[start:])
        return Delta(self.index, text, ids, logprobs, self.finish_reason, self.stop_reason, *self.failure)
