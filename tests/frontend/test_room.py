"""Sequences are counted where they enter, and nobody is forgotten; a real process, but a fake engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import suppress

import pytest

from hex_llm.config import EngineConfig
from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull
from hex_llm.flag_fields import MAX_INT
from hex_llm.frontend.client import EngineClient
from hex_llm.frontend.requests import Places, Room
from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling.limits import max_sequences
from tests.frontend.clients import LONG, SHORT, complete, process_of, until, with_client
from tests.server.fakes import FAILS_TO_ADD, ByteCodec, byte_tokenizer


def test_what_alone_is_too_much_is_never_let_in() -> None:
    places, others = Places(), Places()
    room = Room(places, others)
    room.check(4, 4)
    with pytest.raises(InvalidRequest, match=r"5 sequences .* at most 4 \(--max_concurrent_requests\)"):
        room.check(5, 4)
    with room.preparing(2):
        with pytest.raises(QueueFull):
            room.check(3, 4)
        places.send("a", 2)
    others.send("b", 1)
    assert room.num_sequences == 3
    places.settle("a", 1)
    places.settle("never was", 1)
    others.clear()
    assert (room.num_sequences, places.num_requests) == (1, 1)
    places.settle("a", 5)
    assert (room.num_sequences, places.num_requests) == (0, 0)


def test_a_full_server_says_so_though_its_engine_is_stopped() -> None:
    """At once, and before a text is looked at."""

    async def test(client: EngineClient) -> None:
        codec = ByteCodec()
        client.tokenizer = byte_tokenizer(codec=codec)
        tasks = [asyncio.create_task(complete(client, [5], LONG)) for _ in range(3)]
        await until(lambda: client.replicas[0].status.num_steps > 3)
        os.kill(process_of(client).pid, signal.SIGSTOP)
        tasks.append(asyncio.create_task(complete(client, [5], LONG)))
        await until(lambda: client.replicas[0].status.num_pending == 4)
        started = time.monotonic()
        for _ in range(100):
            with pytest.raises(QueueFull, match="no more than 4"):
                await complete(client, "text", SHORT)
            with pytest.raises(InvalidRequest, match="max_concurrent_requests"):
                await complete(client, "text", SamplingParams(n=5))
        assert time.monotonic() - started < 25
        assert not codec.threads
        for task in tasks:  # that nobody waits for them does not end them in the engine
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(QueueFull):
            await complete(client, [5], SHORT)
        os.kill(process_of(client).pid, signal.SIGCONT)
        await until(lambda: client.room.num_sequences == 0)
        await complete(client, "text", SHORT)

    with_client(test, "FakeEngine(step_s=0.01, max_sequences=4)")


def test_those_that_are_being_prepared_count() -> None:
    class Slow(ByteCodec):
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            time.sleep(0.5)
            return super().encode(text, add_special_tokens)

    async def test(client: EngineClient) -> None:
        client.tokenizer = byte_tokenizer(codec=Slow())
        first = asyncio.create_task(complete(client, "text", SamplingParams(n=2)))
        await asyncio.sleep(0.1)
        with pytest.raises(QueueFull):
            await complete(client, [5], SHORT)
        await first
        await complete(client, [5], SHORT)

    with_client(test, "FakeEngine(max_sequences=2)")


def test_no_place_is_lost() -> None:
    """Whatever becomes of requests, and of the engine."""
    draw = random.Random(0)

    async def ask(client: EngineClient) -> None:
        prompt = draw.choice([[5, 6], [FAILS_TO_ADD], [10**6], "text", []])
        params = SamplingParams(max_tokens=draw.choice((1, 20, 4000)), n=draw.randint(1, 3), ignore_eos=True)
        with suppress(HexError, TimeoutError):
            async with asyncio.timeout(draw.choice((0, 0.01, 0.2, 1))):
                await complete(client, prompt, params)

    async def test(client: EngineClient) -> None:
        for kills in (False, True, False):
            asking = [asyncio.create_task(ask(client)) for _ in range(100)]
            await asyncio.sleep(0.3)
            if kills:
                process_of(client).kill()
            await asyncio.gather(*asking)
            await until(lambda: client.ready)
            await until(lambda: client.room.num_sequences == 0)
            assert client.replicas[0].status.num_pending == 0
            assert not client.replicas[0].requests
        await complete(client, [5] * 60, SamplingParams(n=50, max_tokens=1))

    with_client(test, "FakeEngine(step_s=0.005, max_sequences=50)")


def test_places_are_free_again_when_the_engine_has_gone() -> None:
    async def test(client: EngineClient) -> None:
        tasks = [asyncio.create_task(complete(client, [5], LONG)) for _ in range(4)]
        await until(lambda: client.replicas[0].status.num_steps)
        process_of(client).kill()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, EngineStopped) for end in ends)
        await until(lambda: client.ready)
        assert client.room.num_sequences == 0
        await complete(client, [5] * 9, SamplingParams(n=4))

    with_client(test, "FakeEngine(step_s=0.01, max_sequences=4)")


# ---- how many there may be


def test_the_number_follows_from_memory_and_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 0
    monkeypatch.setattr(os, "sysconf", lambda name: memory if name == "SC_PHYS_PAGES" else 1)

    def most(num_gib: int, max_len: int, max_decode_seqs: int = 256, **flags: int) -> int:
        nonlocal memory
        memory = num_gib << 30
        return max_sequences(EngineConfig(**flags), max_len, max_decode_seqs)  # type: ignore[arg-type]

    assert most(1024, 8192) == 4096
    assert most(1024, 8192, max_decode_seqs=8) == 1024
    assert most(8, 8192) == int(0.8 * 2**30) // (80 * 8192 + 20_000)
    assert most(1, 1 << 20) == 512  # what runs, and as many that wait
    assert most(1, 1 << 20, max_concurrent_requests=3) == 3
    assert most(1, 8192, max_concurrent_requests=MAX_INT) == MAX_INT
