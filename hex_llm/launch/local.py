"""`hex-llm serve` on one host: the HTTP server in this process, the engine in one of its own.

The port is bound before anything else and answers 503 while the model is loaded. SIGTERM and SIGINT let
running requests finish; a second signal does not wait for them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from types import FrameType

import uvicorn

from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.engine.client import EngineClient
from hex_llm.engine.worker import log_from
from hex_llm.errors import ConfigError, HexError, ModelError
from hex_llm.server.app import create_app
from hex_llm.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
SHUTTING_DOWN = "the server is shutting down"
DRAIN_S = 20  # what running requests get after a signal
STOP_S = 2  # what the engine's present step gets after that


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    """Returns after SIGTERM or SIGINT; raises a HexError when the server cannot start."""
    configure_logging(server_config)
    listener = bind(server_config.host, server_config.port)
    name = server_config.served_model_name or engine_config.model or DEFAULT_MODEL_NAME
    engine = EngineClient(engine_config, name)
    try:
        asyncio.run(run(engine, server_config, listener))
    except Exception as error:
        log.debug("the server failed", exc_info=True)
        if isinstance(error, HexError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"the server failed: {type(error).__name__}: {reason}") from error


def configure_logging(config: ServerConfig) -> None:
    level = logging.getLevelNamesMapping()[config.log_level] or 1  # 0, NOTSET, would be the parent's level
    log_from(logging.DEBUG if config.verbose_log else level)
    logging.getLogger("uvicorn").setLevel(level)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: from here on clients can connect, even if they wait for their answer."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # "localhost" is both; who means IPv4 by it is not to be refused.
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host={host}: no such address") from error
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ConfigError(f"--host={host} --port={port}: cannot listen there: {reason}") from error


async def run(engine: EngineClient, config: ServerConfig, listener: socket.socket) -> None:
    """Serves until a signal comes or loading fails, which raises its error."""
    server = Server(engine, config)
    log.info("listening on %s, loading %s", address_of(listener), engine.model_name)
    loading = asyncio.create_task(start(engine, server, config, listener))
    try:
        await server.serve(sockets=[listener])
        if loading.done():
            loading.result()
    finally:
        loading.cancel()
        await asyncio.wait([loading])
        await engine.stop(STOP_S)


async def start(
    engine: EngineClient, server: uvicorn.Server, config: ServerConfig, listener: socket.socket
) -> None:
    address = address_of(listener)
    try:
        await engine.start()
    except BaseException:
        server.should_exit = True
        raise
    print(banner(engine, config, address), flush=True)


class Server(uvicorn.Server):
    def __init__(self, engine: EngineClient, config: ServerConfig) -> None:
        self.engine = engine
        super().__init__(
            uvicorn.Config(
                create_app(engine, config),
                log_config=None,
                access_log=not config.disable_log_requests,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=DRAIN_S + STOP_S,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, it does not raise the signal again at the end: the exit code is 0."""
        if self.should_exit:
            asyncio.get_running_loop().call_soon_threadsafe(self.engine.fail, SHUTTING_DOWN)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Requests that are still running after DRAIN_S get an answer that says so."""
        late = asyncio.get_running_loop().call_later(DRAIN_S, self.engine.fail, SHUTTING_DOWN)
        await super().shutdown(sockets)
        late.cancel()


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def banner(engine: EngineClient, config: ServerConfig, address: str) -> str:
    """Where the server is, what it serves, and a line to paste; the key itself is not shown."""
    url = address.replace("//0.0.0.0:", "//localhost:").replace("[::]", "localhost")
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $API_KEY"'
    return (
        f"\nhex_llm is ready on {address}\n"
        f"  model: {engine.model_name}\n"
        f"  try:   curl {url}{example(engine.tokenizer)} -H 'Content-Type: application/json'{key}\n"
    )


def example(tokenizer: Tokenizer | None) -> str:
    """A path and a body that this model can answer."""
    if tokenizer is None:
        return """/v1/completions -d '{"prompt": [1, 2, 3]}'"""
    if not tokenizer.chat_template:
        return """/v1/completions -d '{"prompt": "The capital of France is"}'"""
    question = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    return f"/v1/chat/completions -d '{question}'"
