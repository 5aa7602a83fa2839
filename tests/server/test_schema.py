"""What /openapi.json says is what the routes do: bodies made from it, right and wrong, are answered as told,
and never with a 5xx. A right one may still be refused: not every rule can be told there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.generation import GenerationMode
from schemathesis.pytest.lazy import get_all_tests
from schemathesis.specs.openapi import checks

from hex_llm.config import ServerConfig
from hex_llm.server.app import create_app
from hex_llm.types import FinishReason, Request, Update
from tests.server.apps import asked
from tests.server.asking import HELLO
from tests.server.fakes import FakeBackend, byte_tokenizer, reversed_updates

MAX_TOKENS = 8
UNCHECKED = (
    checks.positive_data_acceptance,
    checks.allow_header_conformance,  # Starlette names only the methods of the path's first route
)


class Brief(FakeBackend):
    """128 choices of 4096 tokens each would show nothing more. Those that have none at all end, too."""

    def updates(self, request: Request) -> Iterable[Update]:
        most = min(request.params.max_tokens or MAX_TOKENS, MAX_TOKENS)
        params = replace(request.params, max_tokens=most, min_tokens=0)
        ended = set()
        for update in reversed_updates(replace(request, params=params)):
            if update.finish_reason is not None:
                ended.add(update.index)
            yield update
        for index in set(range(params.num_choices)) - ended:
            yield Update(request.request_id, index, finish_reason=FinishReason.STOP)


alike = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(Brief(byte_tokenizer()), ServerConfig(disable_log_requests=True))


@pytest.fixture(scope="module")
def api(app: Any) -> Any:
    api = schemathesis.openapi.from_asgi("/openapi.json", app)
    api.config.generation.update(modes=list(GenerationMode))
    return api


def check_case(case: schemathesis.Case) -> None:
    # GET / is the playground, which is for people and not in the document.
    page = (checks.unsupported_method,) if case.path == "/" else ()
    case.call_and_validate(excluded_checks=[*UNCHECKED, *page])


def check(app: Any, api: Any, max_examples: int) -> None:
    """Not by schemathesis' plugin, which makes the cases of every operation whenever tests are collected."""
    tests = get_all_tests(
        schema=api,
        test_func=check_case,
        settings=settings(alike, max_examples=max_examples),
        given_kwargs=None,
    )
    for made in tests:
        _, test = made.ok()
        test()
        for path, body in HELLO.items():  # it answers as before
            reply = asked(app, "POST", path, json={**body, "temperature": 0})
            assert reply.status_code == 200
            assert "olleh" in reply.text or ">tnatsis" in reply.text  # the end of the chat's prompt


# Of most kinds; /tokenize has as many cases as all but the first together.
FIRST_OF_KIND = ["/v1/chat/completions", "/generate", "/v1/messages", "/v1/embeddings", "/stats"]


@pytest.mark.parametrize("path", FIRST_OF_KIND)
def test_operations_of_every_kind(app: Any, api: Any, path: str) -> None:
    check(app, api.include(path=path), max_examples=2)


@pytest.mark.slow
def test_every_operation_at_length(app: Any, api: Any) -> None:
    check(app, api, max_examples=200)
