"""A client that means harm: every attack of the audit and of the tests' tables, at random, a few at a time.

    python -m tests.reliability.attacks --port 7080 --seconds 60

Prints, as JSON, how often each was tried, what came of it, and every reply of 5xx but 503 and 504.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import Any

from tests.reliability.serving import CHAT, COMPLETIONS, HOST, Json, Reply, ask, exchange, get
from tests.server import hostile
from tests.text.test_grammar_bounds import AMBIGUOUS, BOMBS

MOST_S = 20.0  # of patience with one attack; then its client leaves
DELIBERATE = (503, 504)
WORDS = "lorem ipsum dolor sit amet "
FLOOD = 8  # requests of one attack that are sent at once
TABLES = (
    hostile.of_numbers,
    hostile.of_texts,
    hostile.of_long_texts,
    hostile.of_json,
    hostile.of_templates,
    hostile.of_huge_json,
)


class Attacker:
    def __init__(self, port: int, seed: int) -> None:
        self.port, self.rng = port, random.Random(seed)
        self.tried: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()  # by attack and status; 0: none was waited for
        self.failures: list[str] = []

    async def attack_until(self, end: float) -> None:
        while (left := end - time.monotonic()) > 0:
            attack = self.rng.choice(ATTACKS)
            self.tried[attack.__name__] += 1
            patience = min(left, 0.1 + MOST_S * self.rng.random() ** 2)
            with suppress(TimeoutError, OSError):
                await asyncio.wait_for(attack(self), patience)
            await asyncio.sleep(self.rng.uniform(0, 0.3))

    async def post(self, path: str, body: Json | bytes, name: str, headers: str = "") -> None:
        reply = Reply()
        try:
            await ask(self.port, path, body, reply=reply, headers=headers, parse=False)
        finally:
            self.note(reply, name, path)

    async def raw(self, data: bytes, name: str) -> None:
        reply = Reply()
        try:
            await exchange(self.port, data, reply, parse=False)
        finally:
            self.note(reply, name, "")

    def note(self, reply: Reply, name: str, path: str) -> None:
        self.statuses[f"{name} {reply.status}"] += 1
        if reply.status >= 500 and reply.status not in DELIBERATE:
            self.failures.append(f"{name} {path} {reply.status} {reply.body[:200]!r}")

    async def complete(self, name: str, **fields: Any) -> None:
        await self.post(COMPLETIONS, {"prompt": "Once", "stream": self.rng.random() < 0.5, **fields}, name)

    def unique(self) -> str:
        return f"{self.rng.getrandbits(64):x}"


@cache
def megabytes(count: int) -> str:
    return WORDS * (count * (1 << 20) // len(WORDS))


# ---- what one request asks for


async def slow_grammar(by: Attacker) -> None:
    wanted = {"grammar": f"{AMBIGUOUS}\n// {by.unique()}" if by.rng.random() < 0.5 else AMBIGUOUS}
    n = by.rng.choice((1, 8, 128))
    await by.complete("slow grammar", structured_outputs=wanted, n=n, max_tokens=60)


async def grammar_bomb(by: Attacker) -> None:
    name = by.rng.choice(list(BOMBS))
    given = {**BOMBS[name]}
    if "json" in given:
        given["json"] = json.loads(given["json"]) if "nested" not in name else given["json"]
    await by.complete("grammar bomb", structured_outputs=given, max_tokens=30)


async def bad_schema(by: Attacker) -> None:
    """No two are the same."""
    pattern = by.rng.choice(("(a{1,999}){1,999}{1,999}", "(.*a){20}.*", "[", "(a|b)*a(a|b){30}"))
    schema = {"type": "object", "properties": {by.unique(): {"type": "string", "pattern": pattern}}}
    await asyncio.gather(*(by.complete("bad schema", guided_json=schema, max_tokens=20) for _ in range(3)))


async def good_schema(by: Attacker) -> None:
    schema = {"type": "object", "properties": {by.unique(): {"type": "integer"}}}
    await by.complete("good schema", guided_json=schema, max_tokens=30)


async def fan_out(by: Attacker) -> None:
    prompts, n = by.rng.choice(((1024, 128), (1024, 1), (1, 128), (64, 8)))
    body = {"prompt": ["a"] * prompts, "n": n, "max_tokens": 20, "stream": by.rng.random() < 0.5}
    await by.post(COMPLETIONS, body, "fan-out")


async def best_of(by: Attacker) -> None:
    await by.complete("best of", best_of=128, n=1, max_tokens=50, stream=False)


async def bad_words(by: Attacker) -> None:
    words = [f"{i} " + "ab " * by.rng.choice((10, 20_000)) for i in range(64)]
    await by.complete("bad words", bad_words=words, n=by.rng.choice((1, 4)), max_tokens=50)


async def stop_strings(by: Attacker) -> None:
    stops = [chr(97 + i % 26) * 60_000 + str(i) for i in range(64)]
    await by.complete("stop strings", stop=stops, max_tokens=50)


async def logprobs(by: Attacker) -> None:
    n = by.rng.choice((1, 8, 128))
    body = {
        **hostile.CHAT,
        "logprobs": True,
        "top_logprobs": 20,
        "n": n,
        "max_tokens": 300,
        "min_tokens": 200,
    }
    await by.post(CHAT, body, "logprobs")


async def prompt_logprobs(by: Attacker) -> None:
    fields: Json = by.rng.choice(({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}))
    await by.complete("prompt logprobs", prompt=WORDS * 200, max_tokens=2, stream=False, **fields)


async def tokenize(by: Attacker) -> None:
    body = {"prompt": megabytes(by.rng.choice((1, 4, 9))), "return_token_strs": by.rng.random() < 0.3}
    await by.post("/tokenize", body, "tokenize")


async def long_prompt(by: Attacker) -> None:
    await by.complete("long prompt", prompt=megabytes(by.rng.choice((1, 2, 9))))


async def ids_as_prompt(by: Attacker) -> None:
    await by.complete("ids as prompt", prompt=[5] * by.rng.choice((2047, 2048, 400_000)), max_tokens=5)


async def surrogates(by: Attacker) -> None:
    door = by.rng.choice(hostile.DOORS)
    field = by.rng.choice(("stop", "cache_salt", "guided_regex", "bad_words", "user", "model", "prompt"))
    (body, *_) = door.bodies(**{field: "SURROGATE"})
    content = json.dumps(body).replace("SURROGATE", r"\ud800").encode()
    await by.post(door.path, content, "surrogates")


async def priorities(by: Attacker) -> None:
    flood = (by.complete("priority", priority=-(2**31) + 1, max_tokens=20) for _ in range(FLOOD))
    await asyncio.gather(*flood)


async def nothing_allowed(by: Attacker) -> None:
    fields: Json = by.rng.choice(
        (
            {"allowed_token_ids": [2], "min_tokens": 1},
            {"allowed_token_ids": []},
            {"allowed_token_ids": [5], "bad_words": ["a"], "logit_bias": {"5": -100}},
            {"logit_bias": {str(i): -100 for i in range(1024)}},
        )
    )
    await by.complete("nothing allowed", max_tokens=5, **fields)


async def from_tables(by: Attacker) -> None:
    """A case of tests/server/hostile.py; what becomes of each there, its own test judges."""
    case = by.rng.choice(list(by.rng.choice(TABLES)(by.rng.choice(hostile.DOORS))) or [None])
    if case is not None:
        await by.post(case.path, case.content, f"table: {case.name[:20]}")


async def salts(by: Attacker) -> None:
    salt = by.rng.choice(("", "\0", "\n", "a" * 65_536, "a" * 70_000, "é" * 1000, "0", "💥"))
    await by.complete("salt", cache_salt=salt, max_tokens=3)


async def same_ids(by: Attacker) -> None:
    same = f"x-request-id: {by.rng.choice(('1', 'a' * 200, '127.0.0.1:80'))}\r\n"
    body = {"prompt": "a", "max_tokens": 5, "request_id": "1"}
    await asyncio.gather(*(by.post(COMPLETIONS, body, "same ids", same) for _ in range(FLOOD)))


async def long_output(by: Attacker) -> None:
    await by.complete("long output", max_tokens=1500, ignore_eos=True, n=by.rng.choice((1, 2)))


async def no_such_route(by: Attacker) -> None:
    path = by.rng.choice(("/v1/none", "//v1/completions", "/v1/../etc/passwd", "/%2e%2e", "/v1%2fmodels"))
    await by.post(path, {"prompt": "a"}, "no such route")


async def questions(by: Attacker) -> None:
    paths = ("/metrics", "/health", "/openapi.json", "/v1/models", "/stats")
    await asyncio.gather(*(get(by.port, path) for path in paths))


# ---- what one connection does


@asynccontextmanager
async def connected(
    by: Attacker, buffer: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A small `buffer` holds little of what is not read."""
    plain = socket.socket()
    if buffer:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (HOST, by.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=buffer or 1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post_of(body: Json, path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n" % (path.encode(), len(content)) + (
        b"content-type: application/json\r\n\r\n" + content
    )


async def odd_heads(by: Attacker) -> None:
    good = post_of({"prompt": "a", "max_tokens": 1})
    first, rest = good.split(b"\r\n", 1)
    data = by.rng.choice(
        (
            first + b"\r\nx: " + b"a" * by.rng.choice((100_000, 4_000_000)) + b"\r\n" + rest,
            first + b"\r\n" + b"".join(b"x%d: a\r\n" % i for i in range(20_000)) + rest,
            b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
            good.replace(b"content-length: ", b"content-length: 9"),
            first + b"\r\ntransfer-encoding: chunked\r\n" + rest,
            first + b"\r\ncontent-encoding: gzip\r\n" + rest,
            good.replace(b"HTTP/1.1", b"HTTP/1.0"),
            good.replace(b"POST", b"BREW"),
            good * 20,
            b"\x16\x03\x01" + bytes(200),
            b"\r\n" * 1000,
        )
    )
    await by.raw(data, "odd heads")


async def slowloris(by: Attacker) -> None:
    async def drip() -> None:
        async with connected(by) as (_, writer):
            for byte in post_of({"prompt": "a"}):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)

    await asyncio.gather(*(drip() for _ in range(20)), return_exceptions=True)


async def tiny_chunks(by: Attacker) -> None:
    async with connected(by) as (reader, writer):
        writer.write(post_of({}).split(b"content-length")[0] + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(5000):
            writer.write(b"1\r\n \r\n")
        await writer.drain()
        await reader.read(100)


async def never_reads(by: Attacker) -> None:
    async with connected(by, 4096) as (_, writer):
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 20}
        writer.write(post_of(body))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(MOST_S)


async def leaves(by: Attacker) -> None:
    """At any point: before all is sent, waiting, or in the middle of a stream."""
    async with connected(by) as (reader, writer):
        data = post_of({"prompt": WORDS * 50, "max_tokens": 200, "ignore_eos": True, "stream": True})
        cut = by.rng.choice((len(data) // 2, len(data) - 1, len(data), len(data), len(data)))
        writer.write(data[:cut])
        await asyncio.sleep(by.rng.choice((0, 0.01, 0.2, 1)))
        for _ in range(by.rng.randrange(20) if cut == len(data) else 0):
            await reader.readline()


ATTACKS: tuple[Callable[[Attacker], Awaitable[None]], ...] = (
    slow_grammar, grammar_bomb, bad_schema, good_schema, fan_out, best_of, bad_words, stop_strings, logprobs,
    prompt_logprobs, tokenize, long_prompt, ids_as_prompt, surrogates, surrogates, priorities,
    nothing_allowed, from_tables, from_tables, from_tables, salts, same_ids, long_output, no_such_route,
    questions, odd_heads, slowloris, tiny_chunks, never_reads, leaves, leaves,
)  # fmt: skip


async def attack(port: int, seconds: float, at_once: int, seed: int) -> Json:
    end = time.monotonic() + seconds
    attackers = [Attacker(port, seed + i) for i in range(at_once)]
    await asyncio.gather(*(one.attack_until(end) for one in attackers))
    tried = sum((one.tried for one in attackers), Counter[str]())
    statuses = sum((one.statuses for one in attackers), Counter[str]())
    failures = [failure for one in attackers for failure in one.failures]
    return {"tried": tried, "statuses": dict(sorted(statuses.items())), "failures": failures}


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--seconds", type=float, default=60)
    flags.add_argument("--at_once", type=int, default=8)
    flags.add_argument("--seed", type=int, default=0)
    given = flags.parse_args()
    os.nice(10)  # what attackers take of a shared machine is not the server's doing
    print(json.dumps(asyncio.run(attack(given.port, given.seconds, given.at_once, given.seed))))


if __name__ == "__main__":
    main()
