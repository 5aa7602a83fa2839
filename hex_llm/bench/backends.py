"""The APIs that a load can be sent to: what a request looks like, and what the pieces of its stream mean.

Counted as `vllm bench serve` does: every piece with a choice is one arrival of tokens; how many tokens there
were, the server says at the end, if it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hex_llm.errors import one_line

Prompt = list[int] | str
Json = dict[str, Any]


@dataclass(slots=True)
class Reply:
    """What came of one request. Times are in seconds; `start_time` is time.perf_counter's."""

    prompt_len: int
    start_time: float = 0.0
    queue_time: float = 0.0  # how long --max-concurrency held it back
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0  # to the last piece with a choice
    output_tokens: int = 0  # 0: the server has not said
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # where they were asked for
    error: str = ""

    @property
    def success(self) -> bool:
        return bool(self.texts) and not self.error

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def take(self, text: str, now: float) -> None:
        """One piece with a choice."""
        since_start = now - self.start_time
        if self.texts:
            self.itl.append(since_start - self.latency)
        else:
            self.ttft = since_start
        self.latency = since_start
        self.texts.append(text)


@dataclass(frozen=True)
class Settings:
    """What is the same in every request of a run."""

    model: str
    sampling: Mapping[str, Any]
    ignore_eos: bool
    extra_body: Mapping[str, Any]
    wants_token_ids: bool = False  # a later turn continues with the answer's own tokens


Payload = Callable[[Sequence[Prompt], int, Settings], Json]
Read = Callable[[bytes, Reply, float], None]


@dataclass(frozen=True)
class Dialect:
    path: str
    payload: Payload  # of the turns so far, prompts and answers by turns, and the number of output tokens
    read: Read
    separator: bytes = b"\n"
    prefix: bytes = b"data:"  # of a piece; lines without it are none
    takes_ids: bool = False
    ignores_eos: bool = True


class PieceReader:
    """Cuts the bytes of a stream into pieces and counts them in a reply."""

    def __init__(self, dialect: Dialect, reply: Reply) -> None:
        self._dialect, self._reply = dialect, reply
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        dialect = self._dialect
        *pieces, self._rest = (self._rest + data).split(dialect.separator)
        for piece in pieces:
            if piece.startswith(dialect.prefix):
                self._read(piece[len(dialect.prefix) :].strip(), now)

    def end(self) -> None:
        if self._rest.strip():
            self.feed(self._dialect.separator, self._reply.start_time + self._reply.latency)

    def _read(self, piece: bytes, now: float) -> None:
        if piece == b"[DONE]":
            return
        try:
            self._dialect.read(piece, self._reply, now)
        except (msgspec.MsgspecError, IndexError):
            self._reply.error = f"the stream holds {one_line(piece[:80].decode('utf-8', 'replace'))}"


def _prompt(turns: Sequence[Prompt]) -> Prompt:
    """The turns as one prompt."""
    if isinstance(turns[0], str):
        return "".join(map(str, turns))
    return [token_id for turn in turns for token_id in turn]  # type: ignore[misc]


def _message(error: Any) -> str:
    return one_line(str(error.get("message", error) if isinstance(error, dict) else error))


# ---- OpenAI and vLLM


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def _read_openai(piece: bytes, reply: Reply, now: float) -> None:
    chunk = _decode_chunk(piece)
    if chunk.choices:
        choice = chunk.choices[0]
        reply.take(choice.text or (choice.delta and choice.delta.content) or "", now)
        if choice.token_ids:
            reply.token_ids += choice.token_ids
    if chunk.usage:
        reply.output_tokens = chunk.usage.completion_tokens or 0
        reply.prompt_len = chunk.usage.prompt_tokens or reply.prompt_len
    if chunk.error:
        reply.error = _message(chunk.error)


def _streamed(settings: Settings) -> Json:
    ends = {"ignore_eos": True} if settings.ignore_eos else {}
    ids = {"return_token_ids": True} if settings.wants_token_ids else {}
    fixed = {"model": settings.model, "stream": True, "stream_options": {"include_usage": True}}
    return {**fixed, **ends, **ids, **settings.sampling, **settings.extra_body}


def _completion(turns: Sequence[Prompt], output_len: int, settings: Settings) -> Json:
    # As vLLM's client: without this a model's own default would count, and steps cost more.
    plain = {"repetition_penalty": 1.0}
    return {"prompt": _prompt(turns), "max_tokens": output_len, **plain, **_streamed(settings)}


def _chat(turns: Sequence[Prompt], output_len: int, settings: Settings) -> Json:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages, "max_completion_tokens": output_len, **_streamed(settings)}


# ---- TGI


class _Details(msgspec.Struct):
    generated_tokens: int = 0


class _Token(msgspec.Struct):
    text: str = ""


class _Event(msgspec.Struct):
    token: _Token | None = None
    details: _Details | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _read_tgi(piece: bytes, reply: Reply, now: float) -> None:
    event = _decode_event(piece)
    if event.token:
        reply.take(event.token.text, now)
    if event.details:
        reply.output_tokens = event.details.generated_tokens
    if event.error:
        reply.error = _message(event.error)


def _tgi(turns: Sequence[Prompt], output_len: int, settings: Settings) -> Json:
    # TGI refuses a temperature of 0: greedy is what it does without one.
    sampling = {
        name: value for name, value in settings.sampling.items() if (name, value) != ("temperature", 0)
    }
    parameters = {"max_new_tokens": output_len, "details": True, **sampling, **settings.extra_body}
    return {"inputs": _prompt(turns), "parameters": parameters}


# ---- Hex-LLM on Vertex AI


class _Prediction(msgspec.Struct):
    predictions: list[str] = []
    error: Any = None


_decode_prediction = msgspec.json.Decoder(_Prediction).decode


def _read_vertex(piece: bytes, reply: Reply, now: float) -> None:
    prediction = _decode_prediction(piece)
    if prediction.error:
        reply.error = _message(prediction.error)
    else:
        reply.take(prediction.predictions[0], now)


def _vertex(turns: Sequence[Prompt], output_len: int, settings: Settings) -> Json:
    ends = {"ignore_eos": True} if settings.ignore_eos else {}
    instance = {"prompt": _prompt(turns), "max_tokens": output_len, "stream": True, **ends}
    return {"instances": [{**instance, **settings.sampling, **settings.extra_body}]}


_COMPLETIONS = Dialect("/v1/completions", _completion, _read_openai, takes_ids=True)
DIALECTS = {
    "vllm": _COMPLETIONS,
    "openai": _COMPLETIONS,
    "openai-chat": Dialect("/v1/chat/completions", _chat, _read_openai),
    "tgi": Dialect("/generate_stream", _tgi, _read_tgi, ignores_eos=False),
    "vertex": Dialect("/generate", _vertex, _read_vertex, separator=b"\0", prefix=b""),
}
