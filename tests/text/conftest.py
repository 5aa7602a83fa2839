from __future__ import annotations

from collections.abc import Iterator

import pytest

from hex_llm.config import EngineConfig
from hex_llm.weights.gguf import gguf_tokenizer, open_gguf
from hex_llm.weights.source import fetch
from tests.text.grammars import TOKENIZERS, Setting, trained


@pytest.fixture(scope="module")
def default() -> Iterator[Setting]:
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    setting = Setting(gguf_tokenizer(open_gguf(path)))
    yield setting
    setting.factory.close()


@pytest.fixture(scope="module", params=TOKENIZERS)
def setting(
    request: pytest.FixtureRequest, default: Setting, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    if request.param == "default":
        yield default
        return
    made = Setting(trained(request.param, tmp_path_factory.mktemp(request.param)))
    yield made
    made.factory.close()
