from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.live import live


@pytest.fixture(scope="package")
def url() -> Iterator[str]:
    """A server that says prompts backwards, a byte a token."""
    with live(FakeBackend(byte_tokenizer())) as address:
        yield address


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
