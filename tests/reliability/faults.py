"""What happens to the clients of a real server when something breaks under them, at random moments.

    python -m tests.reliability.faults --rounds 20
    python -m tests.reliability.faults --rounds 20 --only engine_killed raises

Each client must be told its end, once and in time; no process may be left; and serving must go on by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.reliability.points import POINTS
from tests.reliability.serving import (
    CHAT,
    COMPLETIONS,
    FLAGS,
    Json,
    Reply,
    Server,
    Verdicts,
    answers_right,
    ask,
    cancelled,
    held,
    left_of,
    metrics,
    percentile,
)

# Slots for all that the clients ask for and a question: who waits for a slot hears nothing, and rightly.
SLOTS = FLAGS.replace("--max_decode_seqs=16", "--max_decode_seqs=24")
FAULT_FLAGS = f"{SLOTS} --stuck_timeout=5 --drain_timeout=10"
NUM_CLIENTS, NUM_TOKENS = 16, 32
LATE_S = 5  # what is granted beyond --stuck_timeout
RESUME_S = 180  # loading takes long on a busy machine
MAX_DEATHS = 2  # of one server's engine: it is not started again for ever, and not meant to be
STOPPED_S = 10
IDLE_S = 15  # until nothing is done or held any more
CACHE_BYTES = 256 << 20  # of the folder whose disk is full: the model and its programs fit
INJECTION = Path(__file__).parent / "injection"

STREAM = {"stream": True, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
TALK = {"messages": [{"role": "user", "content": "Tell me of the sea."}], **STREAM}
PROMPT = {"prompt": "Once upon a time there was", **STREAM}
KINDS: list[tuple[str, Json]] = [
    (COMPLETIONS, PROMPT),
    (CHAT, TALK),
    (COMPLETIONS, {**PROMPT, "logprobs": 2}),
    (COMPLETIONS, {**PROMPT, "guided_regex": "[a-z ]{200,}"}),
    (COMPLETIONS, {**PROMPT, "bad_words": ["a little girl", "the old king"], "n": 2}),
    (CHAT, {**TALK, "stream": False, "max_tokens": 4}),
]


@dataclass
class Clients:
    """Sixteen that ask again and again until they are told to stop."""

    port: int
    replies: list[Reply] = field(default_factory=list)
    stopping: bool = False

    async def run(self, kind: int) -> None:
        path, body = KINDS[kind % len(KINDS)]
        while not self.stopping:
            reply = Reply(num_choices=body.get("n", 1))
            self.replies.append(reply)
            await ask(self.port, path, body, reply=reply)
            await asyncio.sleep(0 if reply.status == 200 else 0.3)


@dataclass
class Scene:
    """A server, and what may happen to it."""

    server: Server
    rng: random.Random
    folder: Path  # of the injected faults
    point: str = ""
    exit_code: int | None = None  # None: the fault leaves the server alive
    seen: str = ""  # why the fault itself did not happen

    def engine(self) -> psutil.Process:
        found = self.server.engine()
        assert found is not None, self.server.log_tail()
        return found


# ---- faults


async def engine_killed(scene: Scene) -> None:
    scene.engine().kill()


async def engine_stopped(scene: Scene) -> None:
    scene.engine().suspend()


async def engine_paused(scene: Scene) -> None:
    engine = scene.engine()
    engine.suspend()
    await asyncio.sleep(STOPPED_S)
    with suppress(psutil.NoSuchProcess):  # it may have been ended meanwhile, and rightly
        engine.resume()


async def server_killed(scene: Scene) -> None:
    scene.exit_code = -signal.SIGKILL
    scene.server.process.kill()


async def server_terminated(scene: Scene) -> None:
    scene.exit_code = 0
    scene.server.process.terminate()


async def disk_full(scene: Scene) -> None:
    """While it serves, and when its engine is started again."""
    fill(scene.folder)
    await asyncio.sleep(2)
    scene.engine().kill()


async def raises(scene: Scene) -> None:
    """One function, once, at one of the coming calls."""
    fired = scene.folder / "fired"
    fired.unlink(missing_ok=True)
    armed = scene.folder / "armed.new"
    armed.write_text(f"{scene.point} {scene.rng.randint(1, 4)}")
    armed.rename(scene.folder / "armed")
    until = time.monotonic() + 30
    while not fired.exists():
        if time.monotonic() > until:
            (scene.folder / "armed").unlink(missing_ok=True)
            scene.seen = "it was never called"
            return
        await asyncio.sleep(0.02)


Fault = Callable[[Scene], Awaitable[None]]
FAULTS: dict[str, Fault] = {
    one.__name__: one
    for one in (
        *(engine_killed, engine_stopped, engine_paused, server_killed, server_terminated),
        *(disk_full, raises),
    )
}


def fill(folder: Path) -> None:
    with suppress(OSError), (folder / "filling").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 20)):
            pass


# ---- one round


async def round_of(scene: Scene, fault: Fault, limit_s: float) -> tuple[list[str], float]:
    """What was wrong, and the seconds until a question was answered again."""
    server, clients = scene.server, Clients(scene.server.port)
    tasks = [asyncio.create_task(clients.run(i)) for i in range(NUM_CLIENTS)]
    try:
        await asyncio.sleep(scene.rng.uniform(1, 4))
        family, begun = server.family(), time.monotonic()
        await fault(scene)
        problems = [scene.seen] if scene.seen else []
        if scene.exit_code is not None:
            problems += await ended(scene, family)
        resumed = await answers_right(server.port, RESUME_S)
        if resumed is None:
            problems.append(f"no right answer within {RESUME_S} s")
        clients.stopping = True
        await asyncio.wait(tasks, timeout=limit_s + 20)
    finally:
        await cancelled(tasks)
    problems += await restless(server)
    problems += told_wrong(clients.replies, begun, limit_s, scene.exit_code)
    kept = {one.pid for one in server.family()}
    gone = [one for one in family if one.pid not in kept]
    problems += [f"left behind: {one}" for one in await asyncio.to_thread(left_of, gone)]
    return problems, resumed or RESUME_S


async def restless(server: Server) -> list[str]:
    """What a server without clients still holds or does, however long one waits."""
    until = time.monotonic() + IDLE_S
    while True:
        try:
            engine, kept = server.engine(), held(await metrics(server.port))
        except TimeoutError:
            return ["nothing is answered any more once the clients have gone"]
        begun = sum(engine.cpu_times()[:2]) if engine else 0
        await asyncio.sleep(1)
        busy_s = sum(engine.cpu_times()[:2]) - begun if engine and engine.is_running() else 0
        if kept == (0, 0, 0) and busy_s < 0.2:
            return []
        if time.monotonic() > until:
            return [f"not idle in the end: blocks, running, waiting {kept}; {busy_s:.2f} s of 1 busy"]


async def ended(scene: Scene, family: list[psutil.Process]) -> list[str]:
    """Waits for the end of the server and starts it again on its port."""
    server, problems = scene.server, []
    code = await asyncio.to_thread(server.process.wait, 60)
    if code != scene.exit_code:
        problems.append(f"the exit code was {code}")
    problems += [f"left behind: {one}" for one in await asyncio.to_thread(left_of, family)]
    await asyncio.to_thread(server.start)
    return problems


def told_wrong(replies: list[Reply], begun: float, limit_s: float, exit_code: int | None) -> list[str]:
    """What is wrong in what clients were told that were waiting at or after the fault. A server that has gone
    need not tell: its clients see closed connections; one that was killed cannot end what it had begun."""
    problems = []
    for reply in replies:
        if 0 < reply.ended < begun:
            continue
        silent_s = reply.longest_silence(max(begun, reply.asked))
        if silent_s > limit_s:
            problems.append(f"a client heard nothing for {silent_s:.1f} s: {reply.shown()}")
        elif not reply.has_one_end and exit_code != -signal.SIGKILL and (exit_code is None or reply.status):
            problems.append(f"not one end: {reply.shown()}")
    return problems


# ---- all of them


@contextmanager
def scenes(name: str, flags: str, seed: int) -> Iterator[Callable[[], Scene]]:
    """Gives the scene for the next round: its server is a new one when it has seen too much."""
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder), name == "disk_full") as cache:
        env: dict[str, str | None] = {}
        if name == "raises":
            path = os.pathsep.join((str(INJECTION), os.environ.get("PYTHONPATH", "")))
            env = {"PYTHONPATH": path, "HEX_FAULT_FOLDER": folder, "HEX_FAULT_POINTS": "\n".join(POINTS)}
        if cache is not None:
            env = {"HEX_LLM_CACHE": str(cache), "JAX_COMPILATION_CACHE_DIR": None}
        server, engines = Server(flags, Path(folder), env), set[int]()
        rng = random.Random(seed)

        def scene() -> Scene:
            if len(engines) == MAX_DEATHS and server.engine_pid() not in engines:
                server.restart()
                engines.clear()
            engines.add(server.engine_pid())
            return Scene(server, rng, cache or Path(folder))

        with server:
            yield scene


@contextmanager
def small_disk(folder: Path, wanted: bool) -> Iterator[Path | None]:
    """A folder for the server's caches on a file system of its own, which holds the model already."""
    if not wanted:
        yield None
        return
    cache = folder / "cache"
    cache.mkdir(mode=0o700)
    options = f"size={CACHE_BYTES},mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", cache], check=True)
    try:
        known = Path(os.environ.get("HEX_LLM_CACHE", "~/.cache/hex_llm")).expanduser() / "default"
        if known.exists():
            shutil.copytree(known, cache / "default")
        yield cache
    finally:
        subprocess.run(["umount", "--lazy", cache], check=True)


def judge(name: str, given: argparse.Namespace, verdicts: Verdicts) -> None:
    found = re.search(r"--stuck_timeout=(\d+)", given.flags)
    limit_s = LATE_S + (int(found[1]) if found else 20)
    with scenes(name, given.flags, given.seed) as next_scene:
        for point in given.points if name == "raises" else ("",):
            problems, times = list[str](), list[float]()
            for number in range(given.rounds):
                scene = next_scene()
                scene.point = point
                wrong, resumed = asyncio.run(round_of(scene, FAULTS[name], limit_s))
                problems += [f"round {number}: {one}" for one in wrong]
                times.append(resumed)
                (scene.folder / "filling").unlink(missing_ok=True)
                if (
                    resumed >= RESUME_S or not scene.server.is_healthy()
                ):  # the next round gets one that serves
                    scene.server.restart()
            seen = {"problems": problems[:10], "num": len(problems), "resumed_s": percentile(times, 1)}
            verdicts.judge(f"{name} {point}".strip(), not problems, seen)


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--rounds", type=int, default=20, help="of each fault, and of each point")
    flags.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    flags.add_argument(
        "--points", nargs="+", choices=POINTS, default=POINTS, help="that raise", metavar="POINT"
    )
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--flags", default=FAULT_FLAGS, help="of the server")
    given = flags.parse_args(argv)
    verdicts = Verdicts()
    for name in given.only:
        judge(name, given, verdicts)
    return verdicts.conclude()


if __name__ == "__main__":
    sys.exit(main())
