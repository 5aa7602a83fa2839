"""What a front end and an engine process say to each other: typed messages in msgpack, over ZMQ.

A frame is one message. It is decoded strictly into these types, whose own checks run then too, and nothing
in it is ever executed. What cannot be decoded, or is too large to be meant, is thrown away. No jax.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from hex_llm import errors
from hex_llm.admission import Limits
from hex_llm.config import EngineConfig
from hex_llm.errors import HexError, InvalidRequest, ModelError
from hex_llm.ipc.stats import Stats
from hex_llm.types import Request, TokenLogprobs, Update

log = logging.getLogger(__name__)

# A request is bounded by the model's length and vocabulary; a step's longest news are log-probabilities of
# whole prompts. ZMQ hangs up on a peer that announces more, before anything is allocated.
MAX_COMMAND = 64 << 20
MAX_REPORT = 1 << 30
LARGE_REPORT = 256 << 10  # bytes: what takes some milliseconds to decode
LINGER_MS = 1000  # what a closing socket gets to deliver its last messages


# ---- to the engine


class Start(msgspec.Struct, tag=True):
    """The first one: what to load."""

    config: EngineConfig
    log_level: int
    log_format: str = "text"
    num_fronts: int = 1  # front ends, which are all reported to
    is_again: bool = False  # after one that served


class Add(msgspec.Struct, tag=True):
    request: Request


class Abort(msgspec.Struct, tag=True):
    request_id: str


class Stop(msgspec.Struct, tag=True):
    """A stop string ended this choice."""

    request_id: str
    index: int


class Leave(msgspec.Struct, tag=True):
    """A front end has gone: its requests are aborted."""

    front: int


class Shutdown(msgspec.Struct, tag=True):
    """The process ends, whatever is running."""


Command = Start | Add | Abort | Stop | Leave | Shutdown


# ---- from the engine


class Beat(msgspec.Struct, tag=True):
    """The process lives: told again and again, whatever it is at."""

    is_busy: bool  # it is at a step, or compiles for one
    step_s: float  # that it has been at it, compiling left out


class Progress(msgspec.Struct, tag=True):
    """Loading goes on."""

    message: str


class Ready(msgspec.Struct, tag=True):
    limits: Limits
    memory: str = ""  # where it goes, in words


class Step(msgspec.Struct, tag=True):
    """All that one step brought."""

    updates: list[Update]
    num_steps: int  # so far
    stats: Stats = msgspec.field(default_factory=Stats)


class Refused(msgspec.Struct, tag=True):
    """A request was not accepted."""

    request_id: str
    kind: str  # the name of the error's class
    message: str
    param: str | None = None


class Failed(msgspec.Struct, tag=True):
    """The last one: loading or a step failed, and the process ends."""

    kind: str
    message: str


Report = Beat | Progress | Ready | Step | Refused | Failed


def error_of(kind: str, message: str, param: str | None = None) -> HexError:
    """What the engine raised; errors that are none of ours are told by their class."""
    if kind == InvalidRequest.__name__:
        return InvalidRequest(message, param)
    error = getattr(errors, kind, None)
    if isinstance(error, type) and issubclass(error, HexError):
        return error(message)
    return ModelError(f"the engine failed: {kind}: {message}")


T = TypeVar("T")


def encode(message: Command | Report) -> bytes:
    return msgspec.msgpack.encode(message)


SHUTDOWN = encode(Shutdown())  # for who passes frames on, and decodes none


class Reader(Generic[T]):
    """Decodes frames of one direction, and counts those that are none."""

    def __init__(self, messages: Any) -> None:
        """`messages` is Command or Report, which T stands for."""
        self.num_malformed = 0
        self._decoder = msgspec.msgpack.Decoder(messages)

    def decode_large(self, frame: bytes) -> T | Step | None:
        """As `decode`, but in many calls: nothing else runs in the process while one is under way."""
        try:
            step = _RAW_STEP.decode(frame)
        except Exception:  # no step, or none at all
            return self.decode(frame)
        return Step([_update(one) for one in step.updates], step.num_steps, step.stats)

    def decode(self, frame: bytes) -> T | None:
        """None: the frame was malformed."""
        try:
            message: T = self._decoder.decode(frame)
        except Exception as error:  # the types' own checks raise theirs
            self.num_malformed += 1
            # The 1st, 2nd, 4th, 8th, ...: a flood must not fill the log.
            if self.num_malformed.bit_count() == 1:
                log.warning(
                    "malformed frames: %d so far; the last had %d bytes (%s)",
                    self.num_malformed,
                    len(frame),
                    type(error).__name__,
                )
            return None
        return message


# Steps whose log-probabilities are not decoded yet.
class _RawUpdate(Update):
    logprobs: list[msgspec.Raw] = msgspec.field(default_factory=list)  # type: ignore[assignment]
    prompt_logprobs: list[msgspec.Raw] = msgspec.field(default_factory=list)  # type: ignore[assignment]


class _RawStep(msgspec.Struct, tag=Step.__name__):
    updates: list[_RawUpdate]
    num_steps: int
    stats: Stats


_RAW_STEP = msgspec.msgpack.Decoder(_RawStep)
_LOGPROBS = msgspec.msgpack.Decoder(TokenLogprobs)


def _update(raw: _RawUpdate) -> Update:
    decoded = {
        "logprobs": [_LOGPROBS.decode(one) for one in raw.logprobs],
        "prompt_logprobs": [_LOGPROBS.decode(one) for one in raw.prompt_logprobs],
    }
    return Update(**msgspec.structs.asdict(raw) | decoded)


# ---- sockets


def command_address(folder: Path) -> str:
    return f"ipc://{folder}/commands"


def report_address(folder: Path, front: int = 0) -> str:
    return f"ipc://{folder}/reports{front or ''}"


def request_id(front: int) -> str:
    """A new one, of a front end by its number. Nobody can guess it: who knew another's could abort it."""
    return f"{front}-{uuid.uuid4().hex}"


def front_of(request_id: str, num_fronts: int) -> int:
    """Whom to report to; ids that were made elsewhere are the first's."""
    number = request_id.partition("-")[0][:4]
    return int(number) % num_fronts if number.isdecimal() else 0


def set_limits(socket: zmq.Socket[Any], max_frame: int) -> None:
    """Sending never blocks: what waits in a queue is bounded by the requests that are open."""
    socket.set(zmq.MAXMSGSIZE, max_frame)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, LINGER_MS)
