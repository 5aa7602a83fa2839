"""What blocks hold, from the process that filled them straight to the one that goes on with them, over ZMQ.

The sockets are encrypted, and open to those alone who have the keys, which are made at every launch. A parcel
is what some blocks hold: a frame for each array, as plain bytes, of just the size that the pages here say.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import msgspec
import numpy as np
import zmq

from hex_llm.execution.messages import Address, MoveKeys
from hex_llm.execution.programs import Pages
from hex_llm.execution.runner import Runner, move_size
from hex_llm.parallel.links import MAX_GREETING, bound, configure, encrypt_client, encrypt_server, guarded

log = logging.getLogger(__name__)

SEND_MS = 10_000  # after which a process that takes nothing is given up
FRAMES = 8  # on their way to one process at a time, each an array of one layer


class Piece(msgspec.Struct, array_like=True):
    """What comes before the bytes of an array."""

    parcel: int
    group: int  # that it is for
    nth: int
    num_blocks: int


_PIECE = msgspec.msgpack.Decoder(Piece)


class PageForm:
    """How the arrays of a runner's pages look, but for the number of blocks."""

    def __init__(self, runner: Runner) -> None:
        leaves, self.tree = jax.tree.flatten(runner.pages)
        self.arrays = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        self.block_bytes = [math.prod(shape) * dtype.itemsize for shape, dtype in self.arrays]
        self.max_bytes = max(runner.paddings.table_width * max(self.block_bytes), MAX_GREETING)


class Post:
    """Of one process. `news`, called in other threads, tells that a parcel has come (True), or never will."""

    def __init__(
        self, keys: MoveKeys, host: str, runners: dict[int, Runner], news: Callable[[int, bool], None]
    ) -> None:
        """`host`: where others reach this one. `runners` by the numbers of their groups."""
        self._keys, self._news, self._runners = keys, news, runners
        self._forms = {group: PageForm(runner) for group, runner in runners.items()}
        self._lock = threading.Lock()  # of what follows
        self._pieces: dict[int, list[Any]] = {}
        self._come: dict[int, Pages] = {}
        self._dropped: set[int] = set()
        self._outlets: dict[int, Outlet] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = guarded(self._context, keys.outlet[0])
        self._inlet = self._context.socket(zmq.PULL)
        configure(self._inlet, max(form.max_bytes for form in self._forms.values()))
        encrypt_server(self._inlet, keys.inlet)
        self.url = bound(self._inlet, host)
        threading.Thread(target=self._receive, name="inlet", daemon=True).start()

    def send(self, parcel: int, to: Address, contents: Pages, num_blocks: int) -> None:
        """Returns at once; of `contents` the first so many blocks count."""
        outlet = self._outlets.get(to.group)
        if outlet is None or outlet.url != to.url:  # the process that was there has ended
            if outlet is not None:
                outlet.end()
            outlet = self._outlets[to.group] = Outlet(self._context, self._keys, to.url, self._news)
        outlet.send(Piece(parcel, to.group, 0, num_blocks), contents)

    def take(self, parcel: int) -> Pages:
        """One that has come."""
        with self._lock:
            return self._come.pop(parcel)

    def drop(self, parcel: int) -> None:
        """Nobody wants it any more, whether it has come, is coming, or never will."""
        with self._lock:
            self._pieces.pop(parcel, None)
            if self._come.pop(parcel, None) is None:
                self._dropped.add(parcel)

    def close(self) -> None:
        for outlet in self._outlets.values():
            outlet.end()
        self._guard.stop()
        self._context.term()  # which ends the threads' waiting

    def _receive(self) -> None:
        while True:
            try:
                frames = self._inlet.recv_multipart(copy=False)
            except zmq.ContextTerminated:
                self._inlet.close(0)
                return
            try:
                self._take_in(*frames)
            except Exception:  # whatever comes, the next is waited for
                log.exception("a piece of a parcel could not be taken in")

    def _take_in(self, head: zmq.Frame, body: zmq.Frame) -> None:
        piece = _PIECE.decode(head.bytes)
        form = self._forms[piece.group]
        if len(body) != piece.num_blocks * form.block_bytes[piece.nth]:
            self._news(piece.parcel, False)
            raise ValueError(f"{len(body)} bytes are not {piece.num_blocks} blocks")
        shape, dtype = form.arrays[piece.nth]
        filled = np.zeros((move_size(piece.num_blocks), *shape), dtype)
        filled[: piece.num_blocks] = np.frombuffer(body.buffer, dtype).reshape(-1, *shape)
        placed = self._runners[piece.group].pages_from(filled)
        is_last = piece.nth == len(form.arrays) - 1  # they come in order
        with self._lock:
            if piece.parcel in self._dropped:
                self._dropped -= {piece.parcel} if is_last else set()
                return
            self._pieces.setdefault(piece.parcel, []).append(placed)
            if not is_last:
                return
            self._come[piece.parcel] = jax.tree.unflatten(form.tree, self._pieces.pop(piece.parcel))
        self._news(piece.parcel, True)


class Outlet:
    """To one process: a thread that waits for arrays to be computed, and sends them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: MoveKeys,
        url: str,
        news: Callable[[int, bool], None],
    ) -> None:
        self.url = url
        self._context, self._keys, self._news = context, keys, news
        self._parcels: queue.SimpleQueue[tuple[Piece, Pages] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="outlet", daemon=True).start()

    def send(self, first: Piece, contents: Pages) -> None:
        self._parcels.put((first, contents))

    def end(self) -> None:
        self._parcels.put(None)

    def _run(self) -> None:
        with self._context.socket(zmq.PUSH) as socket:
            configure(socket, MAX_GREETING)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.SNDHWM, FRAMES)
            socket.set(zmq.SNDTIMEO, SEND_MS)
            socket.set(zmq.IMMEDIATE, 1)  # nothing waits for a process that has never answered
            encrypt_client(socket, self._keys.inlet[0], self._keys.outlet)
            socket.connect(self.url)
            while (parcel := self._parcels.get()) is not None:
                try:
                    self._send(socket, *parcel)
                except zmq.ContextTerminated:
                    return
                except Exception as error:
                    log.warning("a parcel could not be sent to %s: %s", self.url, error)
                    self._news(parcel[0].parcel, False)

    def _send(self, socket: zmq.Socket[bytes], piece: Piece, contents: Pages) -> None:
        for piece.nth, array in enumerate(jax.tree.leaves(contents)):
            kept = np.ascontiguousarray(np.asarray(array)[: piece.num_blocks])
            head, body = msgspec.msgpack.encode(piece), kept.reshape(-1).view(np.uint8)
            socket.send_multipart([head, body.data], copy=False)
