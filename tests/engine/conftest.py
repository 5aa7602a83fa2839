from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driving import LLAMA


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With LLAMA."""
    path = tmp_path_factory.mktemp("llama")
    LLAMA.save(path)
    return path
