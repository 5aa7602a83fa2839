"""Eight ordinary streams beside a client that means harm, on a real server with the default model.

    python -m tests.reliability.hostile --minutes 30

First the streams run alone: that tells their tokens and how long these take. Then the attacker joins them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field

from tests.reliability.serving import (
    COMPLETIONS,
    ROOT,
    Json,
    Reply,
    Sample,
    Server,
    Verdicts,
    answers_right,
    ask,
    cancelled,
    judged,
    metrics,
    percentile,
    quantile,
    sampled,
    total,
)

NUM_STREAMS, NUM_TOKENS = 8, 96
MAX_SLOWER = 3.0
MAX_LAG_S = 0.05
MAX_GROWTH = 0.05
LAG = "hex_llm:event_loop_lag_seconds"
SETTLED_S = 600  # a shorter run does not judge memory: it has not settled
GREEDY = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
STREAM_S = 300  # a stream that takes longer is lost
PROMPTS = [
    f"{i}. Tell me, in plain words and without haste, {what}. Begin at the beginning, leave nothing out that "
    "a child would ask about, and say at the end what you are not sure of."
    for i, what in enumerate(
        ("how bread is baked", "why the sea is salt", "what a river does", "how a clock tells the time",
         "why leaves fall", "what the moon is made of", "how letters were sent", "why iron rusts")
    )
]  # fmt: skip


@dataclass
class Ordinary:
    """One client that asks the same again and again; `golden` is what it was first told."""

    prompt: str
    golden: list[int] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    num_refused: int = 0
    lost: list[str] = field(default_factory=list)

    async def run(self, port: int, until: float) -> None:
        """Every second time with a salt of its own, which finds nothing in the prefix cache."""
        while time.monotonic() < until:
            salt = f"{time.monotonic()}" if len(self.replies) % 2 else ""
            body = {"prompt": self.prompt, "max_tokens": NUM_TOKENS, "cache_salt": salt, **GREEDY}
            reply = Reply()
            try:
                await asyncio.wait_for(ask(port, COMPLETIONS, body, reply=reply), STREAM_S)
            except TimeoutError:
                self.lost.append(f"no end after {STREAM_S} s: {reply.shown()}")
                continue
            if reply.status in (429, 503) and reply.headers.get("retry-after"):
                self.num_refused += 1
                await asyncio.sleep(1)
            elif reply.completed:
                self.golden = self.golden or reply.token_ids
                self.replies.append(reply)
            else:
                self.lost.append(reply.shown())


async def phase(port: int, streams: list[Ordinary], seconds: float) -> list[Reply]:
    """What the streams got that began in it."""
    before = [len(one.replies) for one in streams]
    until = time.monotonic() + seconds
    await asyncio.gather(*(one.run(port, until) for one in streams))
    return [reply for one, num in zip(streams, before, strict=True) for reply in one.replies[num:]]


def gaps_of(replies: list[Reply]) -> list[float]:
    return [gap for reply in replies for gap in reply.gaps()]


async def attacked(port: int, streams: list[Ordinary], given: argparse.Namespace) -> tuple[list[Reply], str]:
    """The attacker's own report is the second."""
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.reliability.attacks", f"--port={port}"),
        *(f"--seconds={given.minutes * 60}", f"--seed={given.seed}", f"--at_once={given.at_once}"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert attacker.stdout is not None
        report, replies = await asyncio.gather(
            attacker.stdout.read(), phase(port, streams, given.minutes * 60)
        )
    finally:
        if attacker.returncode is None:
            attacker.kill()
        await attacker.wait()
    return replies, report.decode()


async def run(server: Server, given: argparse.Namespace, verdicts: Verdicts) -> None:
    port, samples = server.port, list[Sample]()
    streams = [Ordinary(prompt) for prompt in PROMPTS[:NUM_STREAMS]]
    quiet = await phase(port, streams, given.quiet_s)
    before = await metrics(port)
    sampling = asyncio.create_task(sampled(server, 10, samples))
    replies, report = await attacked(port, streams, given)
    after = await metrics(port)
    await cancelled([sampling])
    resumed = await answers_right(port, 120)
    judge(verdicts, streams, quiet, replies, samples)
    judge_server(verdicts, before, after, json.loads(report))
    verdicts.judge("a question is answered right afterwards", resumed is not None, resumed)
    judge_memory(verdicts, samples, given.minutes * 60 >= SETTLED_S)


def judge(
    verdicts: Verdicts,
    streams: list[Ordinary],
    quiet: list[Reply],
    replies: list[Reply],
    samples: list[Sample],
) -> None:
    changed = [
        f"{one.prompt[:30]}: reply {i} from token {first_difference(reply.token_ids, one.golden)}"
        for one in streams
        for i, reply in enumerate(one.replies)
        if reply.token_ids != one.golden
    ]
    lost = [shown for one in streams for shown in one.lost]
    verdicts.judge("ordinary streams' tokens are unchanged", not changed, changed)
    verdicts.judge("no ordinary stream is lost", not lost, lost)
    alone = set(map(id, quiet))
    served = [sum(id(reply) not in alone for reply in one.replies) for one in streams]
    verdicts.judge("each ordinary client is served", min(served) > 0, served)
    calm, harassed = percentile(gaps_of(quiet), 0.99), percentile(gaps_of(replies), 0.99)
    seen = {"quiet_s": calm, "attacked_s": harassed, "ratio": harassed / calm}
    verdicts.judge(f"p99 gap between tokens at most {MAX_SLOWER:g} x", harassed <= MAX_SLOWER * calm, seen)
    verdicts.note(
        num_quiet=len(quiet),
        num_refused=sum(one.num_refused for one in streams),
        longest_gap_s=max(gaps_of(replies), default=None),
        longest_quiet_gap_s=max(gaps_of(quiet), default=None),
        p50_gap_s=[percentile(gaps_of(quiet), 0.5), percentile(gaps_of(replies), 0.5)],
    )
    pids = {sample.engine_pid for sample in samples}
    verdicts.judge("the engine is never restarted", len(pids) == 1, len(pids) - 1)


def first_difference(ids: list[int], others: list[int]) -> int:
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(ids), len(others)))


def judge_server(verdicts: Verdicts, before: dict[str, float], after: dict[str, float], report: Json) -> None:
    counted = {
        key: after[key] - before.get(key, 0)
        for key in after
        if key.startswith("hex_llm:http_requests_total") and 'status="5' in key
    }
    failures = {k: v for k, v in counted.items() if v and 'status="503"' not in k and 'status="504"' not in k}
    told = sorted(set(report["failures"]))[:20]
    verdicts.judge("no reply of 5xx but 503 and 504", not failures and not told, [failures, told])
    lag = quantile(before, after, LAG, 0.999)
    holds = lag is not None and lag <= MAX_LAG_S
    verdicts.judge(f"event loop's lag p99.9 below {MAX_LAG_S:g} s", holds, lag)
    num_answered = total(after, "hex_llm:http_requests_total") - total(before, "hex_llm:http_requests_total")
    verdicts.note(num_answered=num_answered, tried=report["tried"], statuses=report["statuses"])


def judge_memory(verdicts: Verdicts, samples: list[Sample], settled: bool) -> None:
    """In the end as after a third."""
    third, last = samples[len(samples) // 3].rss, samples[-1].rss
    grown = [now / then - 1 for then, now in zip(third, last, strict=True)]
    seen = {
        "after_a_third": third,
        "in_the_end": last,
        "grown": grown,
        "highest": max(s.rss for s in samples),
    }
    if settled:
        verdicts.judge(f"memory of both processes within {MAX_GROWTH:.0%}", max(grown) <= MAX_GROWTH, seen)
    else:
        verdicts.note(memory=seen)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--minutes", type=float, default=30)
    flags.add_argument("--quiet_s", type=float, default=60)
    flags.add_argument("--at_once", type=int, default=8, help="attacks")
    return judged(run, flags, argv)


if __name__ == "__main__":
    sys.exit(main())
