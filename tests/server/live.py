"""A real HTTP server around a backend, on a free port, for clients that know nothing of these tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from hex_llm.server.common.backend import Backend


@contextmanager
def live(backend: Backend, **config: Any) -> Iterator[str]:
    """The server's address while the block runs; `config` are fields of ServerConfig."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(backend, ServerConfig(**config))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server has not started"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
