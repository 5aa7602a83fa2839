"""Ten times more requests than a real server can do: who is accepted is served, and the rest is told at once.

    python -m tests.reliability.overload --minutes 5

First as many clients as the server takes ask one after another: that is saturation.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter

from tests.reliability.serving import (
    COMPLETIONS,
    FLAGS,
    Connection,
    Json,
    Reply,
    Server,
    Verdicts,
    answers_right,
    ask_again,
    judged,
    percentile,
)

MOST = 64  # sequences that the server takes
TIMES = 10
NUM_CLOSED = 32  # clients at saturation: two for each slot, so that none is ever empty
NUM_TOKENS = 16
MAX_REFUSAL_S = 0.05
END_S = 120  # what the last of the accepted get
SETTLE_S = 5


def body(rng: random.Random) -> Json:
    """A prompt that is in no cache."""
    prompt = f"{rng.getrandbits(32)} ships sailed, and"
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}


class Pool:
    """Connections that are used again, as clients do: who is refused asks on the same one."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.free: list[Connection] = []

    async def ask(self, wanted: Json, reply: Reply | None = None) -> Reply:
        self.free = [one for one in self.free if not one[0].at_eof()]  # the server had closed it
        connection = self.free.pop() if self.free else None
        reply, connection = await ask_again(self.port, COMPLETIONS, wanted, reply or Reply(), connection)
        if connection is not None:
            self.free.append(connection)
        return reply


async def saturated(pool: Pool, seconds: float, rng: random.Random) -> list[Reply]:
    replies: list[Reply] = []
    until = time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < until:
            replies.append(await pool.ask(body(rng)))

    await asyncio.gather(*(client() for _ in range(NUM_CLOSED)))
    return replies


async def overloaded(pool: Pool, seconds: float, rate: float, rng: random.Random) -> list[Reply]:
    """Arrivals at random, whatever becomes of those before."""
    asked: list[tuple[Reply, asyncio.Task[Reply]]] = []
    begun = due = time.monotonic()
    while due < begun + seconds:
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.monotonic(), 0))
        reply = Reply()
        asked.append((reply, asyncio.create_task(pool.ask(body(rng), reply))))
    await asyncio.wait([task for _, task in asked], timeout=END_S)
    for _, task in asked:
        task.cancel()
    return [reply for reply, _ in asked]


def per_second(replies: list[Reply], begin: float, end: float) -> float:
    """Requests that were completed in that time."""
    return sum(one.completed and begin < one.ended < end for one in replies) / (end - begin)


async def run(server: Server, given: argparse.Namespace, verdicts: Verdicts) -> None:
    rng, port = random.Random(given.seed), server.port
    assert await answers_right(port, END_S) is not None
    pool, begun = Pool(port), time.monotonic()
    before = await saturated(pool, given.saturate_s, rng)
    most = per_second(before, begun + SETTLE_S, begun + given.saturate_s)
    begun, seconds = time.monotonic(), given.minutes * 60
    replies = await overloaded(pool, seconds, TIMES * most, rng)
    good = per_second(replies, begun + SETTLE_S, begun + seconds)
    judge(verdicts, replies)
    seen = {"saturated_per_s": most, "overloaded_per_s": good, "ratio": good / most}
    verdicts.judge(f"goodput at least {given.min_goodput:.0%}", good >= given.min_goodput * most, seen)
    resumed = await answers_right(port, END_S)
    verdicts.judge("a question is answered right afterwards", resumed is not None, resumed)


def judge(verdicts: Verdicts, replies: list[Reply]) -> None:
    accepted = [one for one in replies if one.status == 200 or not one.ended]
    refused = [one for one in replies if one.status in (429, 503)]
    others = [one.shown() for one in replies if one.ended and one.status not in (200, 429, 503)]
    lost = [one.shown() for one in accepted if not one.completed]
    verdicts.note(statuses=Counter(one.status for one in replies))
    verdicts.judge("everything accepted completes", bool(accepted) and not lost, [len(lost), lost[:5]])
    verdicts.judge("all others get 429 or 503", bool(refused) and not others, [len(others), others[:5]])
    silent = sum(not one.headers.get("retry-after") for one in refused)
    verdicts.judge("refusals say when to try again", not silent, silent)
    times = [one.ended - one.asked for one in refused]
    median = percentile(times, 0.5)
    seen = {"median_s": median, "p99_s": percentile(times, 0.99)}
    verdicts.judge(f"refusals come in under {MAX_REFUSAL_S:g} s at the median", median < MAX_REFUSAL_S, seen)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--minutes", type=float, default=5)
    flags.add_argument("--saturate_s", type=float, default=60)
    flags.add_argument("--min_goodput", type=float, default=0.95, help="as a part of saturation")
    return judged(run, flags, argv, f"{FLAGS} --max_concurrent_requests={MOST}")


if __name__ == "__main__":
    sys.exit(main())
