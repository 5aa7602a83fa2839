"""One request to an app around a fake backend, and what its reply must look like."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
from fastapi import FastAPI

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from tests.server.fakes import FakeBackend

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
HELLO: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello"},
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    GENERATE: {"prompt": "hello"},
}
POSTS = list(HELLO)
NULLS = ("service_tier", "system_fingerprint", "kv_transfer_params", "prompt_logprobs", "prompt_token_ids",
         "token_ids", "refusal", "annotations", "audio", "function_call", "reasoning")  # fmt: skip
JSON = {"content-type": "application/json"}


class Current:
    """A backend that is another for each request: making an app takes far longer than answering one."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


APPS: dict[tuple[ServerConfig, str, int], tuple[FastAPI, Current]] = {}


def app_around(backend: FakeBackend, config: ServerConfig) -> FastAPI:
    key = (config, backend.model_name, id(backend.tokenizer))  # what an app keeps of its first backend
    if key not in APPS:
        if len(APPS) == 8:
            APPS.clear()
        current = Current(backend)
        APPS[key] = create_app(cast(Any, current), config), current
    app, current = APPS[key]
    current.backend = backend
    return app


def ask(backend: FakeBackend, method: str, path: str, **given: Any) -> httpx.Response:
    """One request; `config` are fields of ServerConfig."""
    app = app_around(backend, ServerConfig(**given.pop("config", {})))

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **given)

    return asyncio.run(send())


def post(backend: FakeBackend, path: str, body: Any, **given: Any) -> Any:
    reply = ask(backend, "POST", path, json=body, **given)
    assert reply.status_code == 200, reply.text
    return said(reply.json())


def said(reply: Any) -> Any:
    """Without the fields that are there for clients who read them, and null."""
    if isinstance(reply, dict) and "choices" in reply:
        assert reply.pop("system_fingerprint", "hex_llm-").startswith("hex_llm-")
    for choice in reply.get("choices", ()) if isinstance(reply, dict) else ():
        for one in (reply, choice, choice.get("message", {})):
            for name in [name for name in NULLS if one.get(name, "") is None]:
                del one[name]
    return reply


def refusal(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    (error,) = reply.json().values()
    assert list(error) == ["message", "type", "param", "code"]
    assert error["code"] == status
    return error


def events(text: str) -> list[dict[str, Any]]:
    """What a client that reads line by line gets; a stream has one `data:` line an event, DONE the last."""
    assert text.endswith("\n\n")
    found = text.removesuffix("\n\n").split("\n\n")
    assert all(one.startswith("data: ") and "\n" not in one for one in found), text
    data = [one.removeprefix("data: ") for one in found]
    assert data.count("[DONE]") == 1
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def stream(backend: FakeBackend, path: str, body: Any, **given: Any) -> list[dict[str, Any]]:
    """The chunks of a reply that is streamed."""
    reply = ask(backend, "POST", path, json={**body, "stream": True}, **given)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text)
