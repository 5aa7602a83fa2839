"""The APIs that a load can be sent to: what a request looks like, and what the pieces of its stream mean.

Counted as `vllm bench serve` does: every piece with a choice is one arrival of tokens; how many tokens there
were, the server says at the end, if it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import msgspec

from hex_llm.errors import one_line

Prompt = list[int] | str
Json = dict[str, Any]
SAMPLING = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "logprobs": int,
    "frequency_penalty": float, "presence_penalty": float, "repetition_penalty": float,
}  # fmt: skip
STREAM = {"stream": True, "stream_options": {"include_usage": True}}  # OpenAI's


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
    turns: list[Prompt] = field(default_factory=list)  # the conversation up to here: prompts and answers

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
class Dialect:
    path: str
    # Of the turns so far (prompts and answers by turns), the number of output tokens, the model's name and
    # the parameters of all requests.
    payload: Callable[[Sequence[Prompt], int, str, Json], Json]
    separator: bytes = b"\n"
    prefix: bytes = b"data:"  # of a piece; lines without it are none
    takes_ids: bool = False
    ignores_eos: bool = True


# ---- requests


def _joined(turns: Sequence[Prompt]) -> Prompt:
    """The turns as one prompt."""
    if isinstance(turns[0], str):
        return "".join(map(str, turns))
    return [token_id for turn in turns for token_id in turn]  # type: ignore[misc]


def _completion(turns: Sequence[Prompt], output_len: int, model: str, params: Json) -> Json:
    # As vLLM's client: without the penalty a model's own default would count, and steps cost more.
    prompt = {"prompt": _joined(turns), "max_tokens": output_len, "repetition_penalty": 1.0}
    return {**prompt, "model": model, **STREAM, **params}


def _chat(turns: Sequence[Prompt], output_len: int, model: str, params: Json) -> Json:
    roles = cycle(("user", "assistant"))
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": messages, "max_completion_tokens": output_len, "model": model, **STREAM, **params}


def _tgi(turns: Sequence[Prompt], output_len: int, model: str, params: Json) -> Json:
    # TGI refuses a temperature of 0: greedy is what it does without one.
    accepted = {name: value for name, value in params.items() if (name, value) != ("temperature", 0)}
    parameters = {"max_new_tokens": output_len, "details": True, **accepted}
    return {"inputs": _joined(turns), "parameters": parameters}


def _vertex(turns: Sequence[Prompt], output_len: int, model: str, params: Json) -> Json:
    instance = {"prompt": _joined(turns), "max_tokens": output_len, "stream": True, **params}
    return {"instances": [instance]}


_COMPLETIONS = Dialect("/v1/completions", _completion, takes_ids=True)
DIALECTS = {
    "vllm": _COMPLETIONS,
    "openai": _COMPLETIONS,
    "openai-chat": Dialect("/v1/chat/completions", _chat),
    "tgi": Dialect("/generate_stream", _tgi, ignores_eos=False),
    "vertex": Dialect("/generate", _vertex, separator=b"\0", prefix=b""),  # Hex-LLM's on Vertex AI
}


# ---- answers


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    token_ids: list[int] | None = None


class _Chunk(msgspec.Struct):
    """A piece of any stream; each dialect fills in fields of its own."""

    choices: list[_Choice] = []  # OpenAI's
    usage: dict[str, Any] | None = None
    token: _Choice | None = None  # TGI's
    details: dict[str, Any] | None = None
    predictions: list[str] = []  # Vertex AI's
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class PieceReader:
    """Cuts the bytes of a stream into pieces and counts them in a reply."""

    def __init__(self, dialect: Dialect, reply: Reply) -> None:
        self._dialect, self._reply = dialect, reply
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        *pieces, self._rest = (self._rest + data).split(self._dialect.separator)
        for piece in pieces:
            content = piece.removeprefix(self._dialect.prefix).strip()
            if piece.startswith(self._dialect.prefix) and content != b"[DONE]":
                self._read(content, now)

    def end(self) -> None:
        if self._rest.strip():
            self.feed(self._dialect.separator, self._reply.start_time + self._reply.latency)

    def _read(self, piece: bytes, now: float) -> None:
        reply = self._reply
        try:
            chunk = _decode(piece)
        except msgspec.MsgspecError:
            reply.error = f"the stream holds {one_line(piece[:80].decode('utf-8', 'replace'))}"
            return
        if choice := chunk.choices[0] if chunk.choices else chunk.token:
            reply.take(choice.text or (choice.delta or {}).get("content") or "", now)
            reply.token_ids += choice.token_ids or ()
        elif chunk.predictions:
            reply.take(chunk.predictions[0], now)
        if usage := chunk.usage or chunk.details:
            reply.output_tokens = usage.get("completion_tokens") or usage.get("generated_tokens") or 0
            reply.prompt_len = usage.get("prompt_tokens") or reply.prompt_len
        if error := chunk.error:
            reply.error = one_line(str(error.get("message", error) if isinstance(error, dict) else error))
