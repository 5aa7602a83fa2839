"""A long time of ordinary use, in which three in ten clients leave before their end: nothing may be kept.

python -m tests.reliability.soak --minutes 60
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter

from tests.reliability.serving import (
    CHAT,
    COMPLETIONS,
    Json,
    Reply,
    Sample,
    Server,
    Verdicts,
    answers_right,
    ask,
    cancelled,
    held,
    judged,
    metrics,
    sampled,
    total,
)

NUM_CLIENTS = 24  # some always wait
LEAVING = 0.3
MAX_SLOPE = 10e6  # bytes an hour
SETTLED_S = 1200  # a shorter run does not judge the slope: its last digits are noise
MORE_FDS = 2  # than after the first quarter
MORE_THREADS = 4  # of pools that were not full by then
IDLE_S = 60
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def body(rng: random.Random) -> tuple[str, Json]:
    """Of many kinds, as traffic is."""
    text = f"{rng.getrandbits(20)} " + "and so on " * rng.choice((1, 5, 40))
    fields: Json = {
        "max_tokens": rng.choice((4, 16, 48)),
        "temperature": rng.choice((0, 1)),
        "stream": rng.random() < 0.7,
        **rng.choice(
            ({}, {}, {}, {"n": 2}, {"stop": ["e"]}, {"guided_json": SCHEMA}, {"bad_words": ["so on"]})
        ),
    }
    if rng.random() < 0.5:
        return CHAT, {"messages": [{"role": "user", "content": text}], **fields}
    return COMPLETIONS, {"prompt": text, **fields}


async def client(port: int, until: float, rng: random.Random, seen: Counter[str]) -> None:
    while time.monotonic() < until:
        path, asked = body(rng)
        reply = Reply(num_choices=asked.get("n", 1))
        # Before the head has gone, waiting, or in the middle of a stream.
        patience = rng.choice((0.0, 0.02, 0.5, 2.0)) if rng.random() < LEAVING else None
        try:
            await asyncio.wait_for(ask(port, path, asked, reply=reply), patience)
            seen["completed" if reply.completed else f"wrong: {reply.shown()}"] += 1
        except TimeoutError:
            seen["left"] += 1


def slope(samples: list[Sample], which: int) -> float:
    """Bytes an hour, of the line nearest to all samples."""
    at, rss = [one.at for one in samples], [one.rss[which] for one in samples]
    return statistics.linear_regression(at, rss).slope * 3600


async def run(server: Server, given: argparse.Namespace, verdicts: Verdicts) -> None:
    port, rng, seen, samples = server.port, random.Random(given.seed), Counter[str](), list[Sample]()
    seconds = given.minutes * 60
    await traffic(port, seconds / 4, rng, seen)
    await idle(port)
    before = await sample(server)
    sampling = asyncio.create_task(sampled(server, max(seconds / 400, 1), samples))
    await traffic(port, seconds * 3 / 4, rng, seen)
    await cancelled([sampling])
    judge_engine(verdicts, await idle(port))
    judge_processes(verdicts, before, samples, await sample(server), seconds >= SETTLED_S)
    wrong = {what: count for what, count in seen.items() if what not in ("completed", "left")}
    verdicts.judge("everyone who stays is served", bool(seen["completed"]) and not wrong, wrong)
    verdicts.note(completed=seen["completed"], left=seen["left"])


async def traffic(port: int, seconds: float, rng: random.Random, seen: Counter[str]) -> None:
    until = time.monotonic() + seconds
    clients = (client(port, until, random.Random(rng.random()), seen) for _ in range(NUM_CLIENTS))
    await asyncio.gather(*clients)


async def sample(server: Server) -> Sample:
    found: list[Sample] = []
    sampling = asyncio.create_task(sampled(server, 1, found))
    while not found:
        await asyncio.sleep(0.1)
    await cancelled([sampling])
    return found[0]


async def idle(port: int) -> dict[str, float]:
    """What the server tells once nothing is left, or when that has been waited for long enough. After a last
    request: the engine tells only when it steps."""
    await answers_right(port, IDLE_S)
    until = time.monotonic() + IDLE_S
    while True:
        numbers = await metrics(port)
        if held(numbers) == (0, 0, 0) or time.monotonic() > until:
            return numbers
        await asyncio.sleep(0.2)


def judge_engine(verdicts: Verdicts, numbers: dict[str, float]) -> None:
    blocks, *sequences = held(numbers)
    verdicts.judge(
        "all blocks are free in the end", blocks == 0 < total(numbers, "hex_llm:kv_blocks"), blocks
    )
    verdicts.judge("all slots are free in the end", sequences == [0, 0], sequences)


def judge_processes(
    verdicts: Verdicts, before: Sample, samples: list[Sample], after: Sample, settled: bool
) -> None:
    """`before` and `after` are of an idle server, at the end of the first quarter and of all."""
    for which, name in enumerate(("server", "engine")):
        fds, threads = ([before.fds[which], after.fds[which]], [before.threads[which], after.threads[which]])
        verdicts.judge(f"files of the {name} are flat", fds[1] <= fds[0] + MORE_FDS, fds)
        verdicts.judge(f"threads of the {name} are flat", threads[1] <= threads[0] + MORE_THREADS, threads)
        seen = {"bytes_an_hour": slope(samples, which), "rss": [before.rss[which], after.rss[which]]}
        if settled:
            holds = seen["bytes_an_hour"] < MAX_SLOPE
            verdicts.judge(f"memory of the {name} grows below 10 MB an hour", holds, seen)
        else:
            verdicts.note(**{f"memory of the {name}": seen})
    pids = {one.engine_pid for one in (before, *samples, after)}
    verdicts.judge("the engine is never restarted", len(pids) == 1, len(pids) - 1)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--minutes", type=float, default=60)
    return judged(run, flags, argv)


if __name__ == "__main__":
    sys.exit(main())
