"""Replies in the making: the pieces of a stream as the engine brings their tokens, and clients that leave.

A stream begins when its first piece is there: what fails before that is a plain HTTP error. Once begun it
always ends with a terminal piece, its own or the one that tells what broke it. A client that goes away closes
what makes the pieces, at once, and that aborts its requests. Not known here: what is in a piece.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from hex_llm.errors import HexError, InvalidRequest
from hex_llm.frontend.beside import shaped
from hex_llm.frontend.outputs import Delta, raise_failure
from hex_llm.frontend.requests import Generation
from hex_llm.sampling_params import SamplingParams
from hex_llm.server.common.backend import Beginning, num_logprobs
from hex_llm.server.common.replies import Whole, openai_end, reply_of

log = logging.getLogger(__name__)

Pieces = AsyncGenerator[bytes, None]
SILENT_S, COMMENT = 15.0, b":\n\n"  # which clients of server-sent events do not look at
INLINE_WRITER = "hex_llm.inline_writer"  # of a scope: its connection's own InlineWriter, if it has one
# Proxies must pass on each piece as it comes; the second is for nginx.
HEADERS = {"cache-control": "no-cache, no-transform", "x-accel-buffering": "no"}


class InlineWriter(Protocol):
    """Where the pieces of a reply go, once its head is sent."""

    async def send(self, piece: bytes) -> None: ...

    def send_now(self, make: Callable[[], bytes]) -> bool:
        """Sends what the function makes, if that can be done without waiting; else it is not called."""


class Silence:
    """Fills it where what the engine says makes no piece for long, as within a call of a tool: proxies close
    connections on which nothing comes."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def filled(self, piece: bytes) -> bytes:
        now = time.monotonic()
        if not piece and now - self._told_at < SILENT_S:
            return b""
        self._told_at = now
        return piece or COMMENT


class AsgiWriter:
    """For connections that have none of their own."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def send(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    def send_now(self, make: Callable[[], bytes]) -> bool:
        return False


# ---- what the engine says


class StreamDelta(msgspec.Struct):
    number: int  # of the generation
    generation: Generation
    delta: Delta


class ReplyStream:
    """Pieces: what `render` makes of all deltas as they come; those of a choice in their order.

    Closing it aborts what is still running. Raises the error of the first choice that fails. Parameters must
    have passed `refuse_best_of`.
    """

    def __init__(self, beginnings: Iterable[Beginning], render: Callable[[StreamDelta], bytes]) -> None:
        self._make, self._silence = render, Silence()
        self._generation: Generation | None = None  # if there is but one, and one choice
        self._pieces = self._made(beginnings)

    def __aiter__(self) -> Pieces:
        return self._pieces

    async def aclose(self) -> None:
        await self._pieces.aclose()

    def use_fast_path(self, writer: InlineWriter) -> None:
        """For who iterates and does nothing but send: pieces may be sent past him while he waits for them.

        This is done for each token of most streams: no task wakes up."""
        if self._generation is not None:
            self._generation.write_inline = partial(writer.send_now, partial(self._said, self._generation))

    async def _made(self, beginnings: Iterable[Beginning]) -> Pieces:
        async with AsyncExitStack() as stack:
            generations = [await stack.enter_async_context(one) for one in beginnings]
            read = self._of_one if len(generations) == 1 else _merged
            async with aclosing(read(generations)) as news:
                async for one in news:
                    raise_failure(one.delta)
                    if piece := await shaped(_size(one), partial(self._render, one)):
                        yield piece

    def _render(self, news: StreamDelta) -> bytes:
        return self._silence.filled(self._make(news))

    async def _of_one(self, generations: Sequence[Generation]) -> AsyncGenerator[StreamDelta, None]:
        [generation] = generations
        if generation.collector.request.params.num_choices == 1:  # so that none fails before the end
            self._generation = generation
        async for delta in generation:
            yield StreamDelta(0, generation, delta)

    def _said(self, generation: Generation) -> bytes:
        deltas = generation.collector.deltas()
        return self._render(StreamDelta(0, generation, deltas[0])) if deltas else b""  # of its one choice


def _size(news: StreamDelta) -> int:
    """How much there is to say; maybe less."""
    request = news.generation.collector.request
    # Beside an echo's log-probabilities stand those of the prompt.
    num_echoed = len(request.prompt_ids) if request.params.echo and news.delta.logprobs is not None else 0
    return delta_size(news.delta) + num_echoed


def delta_size(delta: Delta) -> int:
    return len(delta.token_ids) + num_logprobs(delta.logprobs)


def refuse_best_of(params: SamplingParams) -> None:
    if params.num_choices > params.n:
        raise InvalidRequest.at(
            "best_of", "which choices are the best is known only at the end, so they cannot be streamed"
        )


async def _merged(generations: Sequence[Generation]) -> AsyncGenerator[StreamDelta, None]:
    # Small: what is not read soon is put together where it comes from.
    queue: asyncio.Queue[StreamDelta | HexError | None] = asyncio.Queue(len(generations))

    async def pump(number: int, generation: Generation) -> None:
        try:
            async for delta in generation:
                await queue.put(StreamDelta(number, generation, delta))
            await queue.put(None)
        except HexError as error:
            await queue.put(error)

    pumps = [asyncio.create_task(pump(*one)) for one in enumerate(generations)]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, HexError):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()


# ---- what the client gets


async def unless_gone(request: Request, work: Coroutine[Any, Any, Whole]) -> Response:
    """The work's result as a reply. If the client leaves first, the work is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(client_leaves(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads the 499; nginx gives this case the same number.
        return await reply_of(task.result()) if task.done() else Response(status_code=499)
    finally:
        task.cancel()
        gone.cancel()


async def client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def streamed(
    request: Request,
    pieces: Pieces | ReplyStream,
    *,
    broken: Callable[[Exception], bytes] = openai_end,
    media_type: str = "text/event-stream",
) -> Response:
    """A reply of `pieces`, of which the last must be the terminal one; `broken` makes it after an error.

    Waits for the first piece, and raises what is raised instead of it.
    """
    gone = asyncio.ensure_future(client_leaves(request))
    first = asyncio.ensure_future(anext(aiter(pieces), b""))
    try:
        await asyncio.wait((first, gone), return_when=asyncio.FIRST_COMPLETED)
        if first.done():
            return _Streamed(first.result(), pieces, broken, gone, media_type)
        return Response(status_code=499)  # as unless_gone
    except BaseException:
        gone.cancel()
        raise
    finally:
        first.cancel()  # which closes what it waits for


class _Streamed(Response):
    """Starlette's StreamingResponse may leave what makes the pieces waiting for its next reader, who will not
    come; and what is done here for each piece is done for each token."""

    def __init__(
        self,
        first: bytes,
        pieces: Pieces | ReplyStream,
        broken: Callable[[Exception], bytes],
        gone: asyncio.Future[None],
        media_type: str,
    ) -> None:
        super().__init__(None, headers=HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self.first = first
        self.pieces = pieces
        self.broken = broken
        self.gone = gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = scope.get(INLINE_WRITER) or AsgiWriter(send)
        sending = asyncio.ensure_future(self._send(send, writer))
        try:
            await asyncio.wait((sending, self.gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            self.gone.cancel()

    async def _send(self, send: Send, writer: InlineWriter) -> None:
        async with aclosing(self.pieces):
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            await writer.send(self.first)
            if isinstance(self.pieces, ReplyStream):
                self.pieces.use_fast_path(writer)
            try:
                async for piece in self.pieces:
                    await writer.send(piece)
            except Exception as error:
                if not isinstance(error, HexError):
                    log.exception("a stream broke")
                await writer.send(self.broken(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
