from __future__ import annotations

import asyncio
import logging
import math
import pickle
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hex_llm.config import EngineConfig
from hex_llm.frontend.beside import decoded
from hex_llm.ipc.protocol import (
    Abort,
    Add,
    Command,
    Failed,
    Progress,
    Reader,
    Ready,
    Refused,
    Report,
    Shutdown,
    Start,
    Step,
    Stop,
    encode,
)
from hex_llm.ipc.stats import Stats
from hex_llm.sampling_params import SamplingParams, StructuredOutputs
from hex_llm.types import FinishReason, Request, TokenLogprobs, Update
from tests.server.fakes import LIMITS
from tests.server.lag import like_a_server, watched

PARAMS = SamplingParams(
    n=2,
    best_of=3,
    temperature=0,
    logit_bias={5: 1.5},
    seed=-(2**63),
    max_tokens=None,
    stop=("a", "\n"),
    stop_token_ids=(1, 2),
    allowed_token_ids=(7,),
    structured_outputs=StructuredOutputs(choice=("yes", "nö")),
)
COMMANDS = [
    Start(EngineConfig(hf_token="secret", max_model_len=12), 10),
    Add(Request("r", [1, 2**31 - 1], PARAMS, -3, "salt", [[1, 2], [3]])),
    Abort("r"),
    Stop("r", 1),
    Shutdown(),
]
UPDATE = Update(
    "r",
    1,
    [5],
    [TokenLogprobs(-math.inf, 3, [1, 2], [-0.5, -1.0])],
    [TokenLogprobs(-1.0, 1, [], [])],
    4,
    FinishReason.STOP,
    5,
    "error",
)
REPORTS = [
    Progress("Compiling 1/2"),
    Ready(LIMITS, "memory: enough"),
    Step([UPDATE, Update("s")], 7, Stats(num_running=2, wait_s=0.5, waited=[("r", 0.25)])),
    Refused("r", "InvalidRequest", "bad", "prompt"),
    Failed("ModelError", "worse"),
]


@pytest.mark.parametrize(("kind", "messages"), [(Command, COMMANDS), (Report, REPORTS)])
def test_messages_come_out_as_they_went_in(kind: Any, messages: list[Any]) -> None:
    reader: Reader[Any] = Reader(kind)
    assert [reader.decode(encode(message)) for message in messages] == messages
    assert reader.num_malformed == 0


def test_a_message_of_the_other_direction_is_malformed() -> None:
    for kind, messages in ((Command, REPORTS), (Report, COMMANDS)):
        reader: Reader[Any] = Reader(kind)
        assert [reader.decode(encode(message)) for message in messages] == [None] * len(messages)
        assert reader.num_malformed == len(messages)


def changed(message: Add, *path: str, value: Any) -> bytes:
    """The frame of a message with one field changed, whatever its type."""
    plain = msgspec.msgpack.decode(encode(message))
    inner = plain
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return msgspec.msgpack.encode(plain)


ADD = Add(Request("r", [1], SamplingParams()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("type",), "Exec"),
        (("request",), None),
        (("request", "request_id"), 5),
        (("request", "prompt_ids"), "abc"),
        (("request", "prompt_ids"), [1.0]),
        (("request", "prompt_ids"), [True]),
        (("request", "params", "temperature"), "0"),
        (("request", "params", "temperature"), math.nan),
        (("request", "params", "temperature"), -1.0),
        (("request", "params", "n"), 10**6),
        (("request", "params", "seed"), 2**64 - 1),
        (("request", "params", "logit_bias"), {1: math.inf}),
        (("request", "params", "stop"), [b"\xff"]),
        (("request", "params", "structured_outputs"), {}),
    ],
)
def test_types_and_ranges_are_checked(path: tuple[str, ...], value: Any) -> None:
    reader: Reader[Any] = Reader(Command)
    assert reader.decode(changed(ADD, "request", "prompt_ids", value=[1])) == ADD
    assert reader.decode(changed(ADD, *path, value=value)) is None
    assert reader.num_malformed == 1


def test_frames_that_are_none(caplog: pytest.LogCaptureFixture) -> None:
    """Random bytes, pieces of messages, messages with wrong bytes in them, and what is nested too deeply."""
    caplog.set_level(logging.WARNING)
    draw = random.Random(0)
    whole = [encode(message) for message in (*COMMANDS, *REPORTS)]
    frames = [b"", b"\x91" * 1_000_000, b"\x81\xa1a" * 100_000]
    for _ in range(10_000):
        frame = bytearray(draw.choice(whole))
        for _ in range(draw.randint(0, 3)):
            frame[draw.randrange(len(frame))] = draw.randrange(256)
        frames += [draw.randbytes(draw.randint(0, 200)), bytes(frame[: draw.randrange(len(frame))])]
        frames.append(bytes(frame))
    for kind in (Command, Report):
        reader: Reader[Any] = Reader(kind)
        for frame in frames:
            message = reader.decode(frame)
            assert message is None or isinstance(message, kind)
        assert reader.num_malformed > 20_000
    assert len(caplog.records) < 50


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (canary,)

    reader: Reader[Any] = Reader(Command)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        frame = pickle.dumps(Touch(), protocol)
        for one in (
            frame,
            msgspec.msgpack.encode(frame),
            msgspec.msgpack.encode(msgspec.msgpack.Ext(5, frame)),
        ):
            assert reader.decode(one) is None
    assert not canary.exists()


def test_a_large_step_is_decoded_as_a_small_one() -> None:
    known = TokenLogprobs(-0.5, 3, [1, 2], [-0.25, -math.inf])
    updates = [
        Update("a", 1, [5], [known], [known] * 3, 7, FinishReason.STOP, 5),
        Update("b", error="no", param="seed"),
    ]
    for message in Step(updates, 9, Stats(num_running=2)), Progress("half"), Failed("kind", "why"):
        frame, reader = encode(message), Reader[Report](Report)
        assert reader.decode_large(frame) == reader.decode(frame) == message
    assert reader.decode_large(b"no frame") is None
    assert reader.num_malformed == 1


def test_the_loop_goes_on_while_a_large_step_is_decoded() -> None:
    known = TokenLogprobs(-0.5, 3, list(range(20)), [-0.25] * 20)
    frame = encode(Step([Update("a", prompt_logprobs=[known] * 100_000)], 1))
    reader = Reader[Report](Report)
    with like_a_server():
        step, pause, took = asyncio.run(watched(decoded(lambda: reader.decode_large(frame))))
    assert isinstance(step, Step)
    assert len(step.updates[0].prompt_logprobs) == 100_000
    assert pause < took / 2
