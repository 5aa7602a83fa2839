"""`hex-llm serve` on one host: the HTTP server in this process, the engine in one of its own.

The port is bound before anything else and answers 503 while the model is loaded. After SIGTERM or SIGINT it
answers 503 again while running requests finish; a second signal does not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from hex_llm.cluster import located, parts_of
from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ConfigError, EngineStopped, HexError, ModelError
from hex_llm.frontend.client import EngineClient
from hex_llm.frontend.devices import variables_of
from hex_llm.heap import keep_all
from hex_llm.ipc.stats import EngineState
from hex_llm.launch.connection import SEND_BUFFER, connection
from hex_llm.launch.fronts import Fronts
from hex_llm.logs import log_from
from hex_llm.server.app import create_app
from hex_llm.server.metrics import Metrics
from hex_llm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
TICK_S = 0.05  # between two looks at what is still running
TURN_S = 0.001  # after which a thread at large work must let the event loop go on
ENDED = (EngineState.GIVEN_UP, EngineState.SHUTTING_DOWN)
STOP_S = 2  # what the last replies, then the engine's present step, get at the end


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Returns after SIGTERM or SIGINT; raises a HexError when the server cannot start."""
    configure_logging(server_config)
    sys.setswitchinterval(TURN_S)
    engine_config = located(engine_config, os.environ)
    if engine_config.host_index:
        serve_host(engine_config)
        return
    check_fronts(engine_config, server_config)
    if engine_config.worker_distributed_method == "ray" and engine_config.num_hosts > 1:
        from hex_llm.launch.ray import ray_hosts

        with ray_hosts(engine_config) as engine_config:
            serve_clients(engine_config, server_config)
    else:
        serve_clients(engine_config, server_config)


def serve_host(config: EngineConfig) -> None:
    """A host other than the first, until that ends or a signal comes."""
    if parts_of(config) is not None:
        from hex_llm.launch.remote import lend

        lend(config, variables_of(config, os.environ))
    else:
        run_loop(follow(EngineClient(config)))


def serve_clients(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    listeners = bind_all(server_config)
    name = server_config.served_model_name or engine_config.model or DEFAULT_MODEL_NAME
    engine = EngineClient(engine_config, name)
    engine.chat_template = template_of(server_config.chat_template)
    run_loop(run(engine, server_config, listeners))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main)
    except Exception as error:
        log.debug("the server failed", exc_info=True)
        if isinstance(error, HexError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the server failed: {type(error).__name__}: {reason}") from error


def new_event_loop() -> asyncio.AbstractEventLoop:
    """The fastest there is: uvloop is not made for every system."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def configure_logging(config: ServerConfig) -> None:
    level = logging.getLevelNamesMapping()[config.log_level] or 1  # 0, NOTSET, would be the parent's level
    log_from(logging.DEBUG if config.verbose_log else level, config.log_format)
    logging.getLogger("uvicorn").setLevel(level)


def check_fronts(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    most, num_fronts = engine_config.max_concurrent_requests, server_config.api_server_count
    if most is not None and most < num_fronts:
        raise ConfigError(f"--api_server_count={num_fronts}: more than --max_concurrent_requests={most}")


def bind_all(config: ServerConfig) -> list[socket.socket]:
    """One socket for each front end; the first is listening."""
    if config.uds is not None:
        return [bind_unix(config.uds)] * config.api_server_count
    first = bind(config.host, config.port)
    if config.api_server_count == 1:
        return [first]
    # Sockets that share a port would also share it with another server: so it was tried alone before.
    family, address = first.family, first.getsockname()
    first.close()
    sockets = [socket.socket(family) for _ in range(config.api_server_count)]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        each.bind(address)
    sockets[0].listen(2048)
    return sockets


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: from here on clients can connect, even if they wait for their answer."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # "localhost" is both; who means IPv4 by it is not to be refused.
        family, _, _, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)  # its connections inherit it
        return listener
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host={host}: no such address") from error
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"--host={host} --port={port}: cannot listen there: {reason}") from error


def bind_unix(path: str) -> socket.socket:
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # of a server that has ended
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(2048)
        return listener
    except OSError as error:
        raise ConfigError(f"--uds={path}: cannot listen there: {error.strerror or error}") from error


def template_of(given: str | None) -> str | None:
    """What a file holds; or a template itself, which no name of a file looks like."""
    try:
        return given if given is None or "{" in given else Path(given).expanduser().read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat_template={given}: cannot be read: {error}") from error


async def run(engine: EngineClient, config: ServerConfig, listeners: list[socket.socket]) -> None:
    """Serves until a signal comes or loading fails, which raises its error."""
    server = Server(engine, config)
    listener = listeners[0]
    log.info("listening on %s, loading %s", address_of(listener), engine.model_name)
    fronts = server.fronts = Fronts(engine, config, listeners) if len(listeners) > 1 else None
    loading = asyncio.create_task(start(engine, server, config, listener))
    beside = [asyncio.create_task(server.metrics.watch_loop())]
    if fronts is not None:
        beside.append(asyncio.create_task(server.metrics.share(fronts.folder, 0, len(listeners))))
    try:
        await server.serve(sockets=[listener])
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        await asyncio.wait([loading])
        if fronts is not None:
            await fronts.end(config.drain_timeout + STOP_S)
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        await engine.stop(STOP_S)


async def follow(engine: EngineClient) -> None:
    """On a host that does as another one tells it: until that one ends, or a signal comes."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stopping.set)
    starting, stopped = asyncio.create_task(engine.start()), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            log.info("following the first host")
        while not stopping.is_set() and (state := engine.replicas[0].status.state) not in ENDED:
            await asyncio.sleep(TICK_S)
        if not stopping.is_set() and state is EngineState.GIVEN_UP:
            raise EngineStopped(state.value)
    finally:
        for task in (starting, stopped):
            task.cancel()
        await asyncio.wait((starting, stopped))
        await engine.stop(STOP_S)


async def start(engine: EngineClient, server: Server, config: ServerConfig, listener: socket.socket) -> None:
    address = address_of(listener)
    try:
        await engine.start()
        if server.fronts is not None:  # not before: until then one is enough to say that nothing is ready
            await server.fronts.start()
    except BaseException:
        server.should_exit = True
        raise
    keep_all()
    print(banner(engine, config, address), flush=True)


class Server(uvicorn.Server):
    fronts: Fronts | None = None  # further ones, that this one has started

    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        self.drain_s = config.drain_timeout
        self.metrics = Metrics(engine.model_name, *(one.status for one in engine.replicas))
        self.num_signals = 0
        engine.observe(self.metrics)
        engine.log_format, engine.num_fronts = config.log_format, config.api_server_count
        engine.router.is_shared = config.api_server_count > 1
        engine.request_timeout_s = config.request_timeout
        engine.stuck_timeout_s, engine.step_timeout_s = config.stuck_timeout, config.step_timeout
        super().__init__(
            uvicorn.Config(
                create_app(engine, config, self.metrics),
                http=connection(config.receive_timeout, config.send_timeout),
                timeout_keep_alive=config.keep_alive_timeout,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=STOP_S,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, it does not raise the signal again at the end: the exit code is 0."""
        self.num_signals += 1
        self.metrics.draining = True
        if self.fronts is not None:
            self.fronts.signal(sig)

    async def on_tick(self, counter: int) -> bool:
        """After a signal new requests are turned away, and the end comes with that of the running ones."""
        if self.num_signals and not self.should_exit:
            await self.drain()
            self.should_exit = True
        return await super().on_tick(counter)

    async def drain(self) -> None:
        """Requests that are still running in the end get an answer that says so."""
        log.info("shutting down; requests that are running: %d", self.metrics.num_open)
        until = time.monotonic() + self.drain_s
        while self.metrics.num_open and self.num_signals == 1 and time.monotonic() < until:
            await asyncio.sleep(TICK_S)
        self.engine.fail(EngineState.SHUTTING_DOWN)


def address_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(engine: EngineClient, config: ServerConfig, address: str) -> str:
    """Where the server is, what it serves, and a line to paste; the key itself is not shown."""
    url = address.replace("//0.0.0.0:", "//localhost:").replace("[::]", "localhost")
    memory = "\n".join(f"  {one.status.memory or 'memory: unknown'}" for one in engine.replicas)
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $API_KEY"'
    return (
        f"\nhex_llm is ready on {address}\n"
        f"  model: {engine.model_name}\n"
        f"{memory}\n"
        f"  try:   curl {url}{example(engine.tokenizer)} -H 'Content-Type: application/json'{key}\n"
    )


def example(tokenizer: Tokenizer | None) -> str:
    """A path and a body that this model can answer."""
    if tokenizer is None:
        return """/v1/completions -d '{"prompt": [1, 2, 3], "temperature": 0}'"""
    if not tokenizer.chat_template:
        return """/v1/completions -d '{"prompt": "The capital of France is", "temperature": 0}'"""
    message = '{"role": "user", "content": "What is the capital of France?"}'
    return f"""/v1/chat/completions -d '{{"messages": [{message}], "temperature": 0}}'"""
