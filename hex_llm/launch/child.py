"""A further front end, `python -m hex_llm.launch.child`, started by the first one (`launch/fronts.py`). It
supervises nothing, and ends with its parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path

from hex_llm.config import EngineConfig
from hex_llm.engine.worker import continue_without_parent
from hex_llm.frontend.client import EngineClient
from hex_llm.heap import keep_all
from hex_llm.launch import local
from hex_llm.launch.fronts import (
    ALIVE_S,
    MAX_LINE,
    TICK_S,
    EngineNews,
    RestartAll,
    SentKeys,
    Setup,
    ToChild,
    line_of,
)

READY_S = 5.0  # what it waits to hear of an engine before it answers


class Follower(EngineClient):
    """Knows of the engines what its parent tells."""

    parent: asyncio.WriteTransport
    folder: Path  # of all front ends

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        super().__init__(config, model_name)
        self.heard = asyncio.Event()  # of an engine that serves

    def restart(self) -> None:
        self.parent.write(line_of(RestartAll()))

    async def follow(self, lines: asyncio.StreamReader) -> None:
        """Ends the process when the parent has gone."""
        while line := await lines.readline():
            match ToChild.decode(line):
                case EngineNews(replica, state, folder, ready):
                    await self.replicas[replica].follow(state, folder, ready)
                case SentKeys(keys):
                    self.router.take_in(keys)
            if self.ready and not self.heard.is_set():
                self.heard.set()
                keep_all()
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)

    async def tell(self) -> None:
        """What was sent to replicas from here, and that this process lives."""
        silent_s = ALIVE_S
        while True:
            if (keys := self.router.take_noted()) or silent_s >= ALIVE_S:
                self.parent.write(line_of(SentKeys(keys)))
                silent_s = 0.0
            await asyncio.sleep(TICK_S)
            silent_s += TICK_S


async def serve() -> None:
    """Until a signal comes, or the parent goes."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin.buffer)
    setup = ToChild.decode(await lines.readline())
    assert isinstance(setup, Setup)
    config = setup.server_config
    local.configure_logging(config)
    engine = Follower(setup.engine_config, setup.model_name)
    engine.parent, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout.buffer)
    engine.chat_template = local.template_of(config.chat_template)
    engine.front, engine.folder = setup.front, Path(setup.folder)
    server = local.Server(engine, config)
    sharing = server.metrics.share(engine.folder, setup.front, config.api_server_count)
    jobs = (engine.follow(lines), engine.tell(), server.metrics.watch_loop(), sharing)
    tasks = [asyncio.create_task(job) for job in jobs]
    with suppress(TimeoutError):  # others answer meanwhile, and who has come waits, but not for ever
        await asyncio.wait_for(engine.heard.wait(), READY_S)
    await server.serve(sockets=[socket.socket(fileno=setup.listener)])
    for task in tasks:
        task.cancel()


def main() -> None:
    continue_without_parent()
    sys.setswitchinterval(local.TURN_S)
    with asyncio.Runner(loop_factory=local.new_event_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
