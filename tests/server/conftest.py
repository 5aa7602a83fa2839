from __future__ import annotations

import pytest

from tests.server.fakes import FakeBackend, byte_tokenizer


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(byte_tokenizer())
