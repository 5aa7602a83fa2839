"""--strict_model_name: who names another model is told that it is not here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.asking import ask, refusal
from tests.server.fakes import FakeBackend, byte_tokenizer

STRICT = {"strict_model_name": True}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/chat/completions", MESSAGES),
    ("/v1/responses", {"input": "hello"}),
    ("/generate", {"@requestFormat": "chatCompletions", **MESSAGES}),
]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(byte_tokenizer())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
def test_another_name_is_refused(backend: FakeBackend, path: str, body: dict[str, Any], stream: bool) -> None:
    for name in ("gpt-4o", "Fake", "fake\n"):
        reply = ask(backend, "POST", path, json={**body, "model": name, "stream": stream}, config=STRICT)
        error = refusal(reply, 404)
        assert (error["type"], error["param"]) == ("invalid_request_error", "model")
        if name.isprintable():
            assert error["message"] == f"The model `{name}` does not exist."
    assert not backend.asked


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=lambda value: value if isinstance(value, str) else "")
def test_names_that_are_taken(backend: FakeBackend, path: str, body: dict[str, Any]) -> None:
    for more in ({}, {"model": "fake"}, {"model": None}):
        assert ask(backend, "POST", path, json={**body, **more}, config=STRICT).status_code == 200
    assert ask(backend, "POST", path, json={**body, "model": "gpt-4o"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", {"prompt": "hello", "model": "x"}),
        ("/invocations", {**MESSAGES, "model": "x"}),
        ("/vertex", {"instances": [{**MESSAGES, "model": "x"}]}),
    ],
)
def test_tgi_tells_it_in_its_own_shape(backend: FakeBackend, path: str, body: dict[str, Any]) -> None:
    reply = ask(backend, "POST", path, json=body, config=STRICT)
    assert reply.status_code == 422
    assert "The model `x` does not exist" in reply.json()["error"]
