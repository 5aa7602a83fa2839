"""LangChain, LlamaIndex and LiteLLM against a real HTTP server, in environments of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hex_llm.types import Request, Update
from tests.server import frameworks
from tests.server.fakes import CALLS, Speaker, byte_tokenizer
from tests.server.live import live

# Each in an environment of its own: they need other versions of openai's client than each other.
PACKAGES = {
    "langchain": ["langchain-openai"],
    "llama_index": ["llama-index-llms-openai-like"],
    "litellm": ["litellm", "mcp"],  # it takes tools only where mcp is, which it does not bring
}
TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{# <tool_call> #}"
)
TEXT, END = "Hi, é there!", "It rains in both."


class Caller(Speaker):
    """Answers with calls where there are tools, and in words once it has their results."""

    def updates(self, request: Request) -> Iterable[Update]:
        assert self.tokenizer is not None
        prompt = self.tokenizer.decode(request.prompt_ids)
        self.text = (
            END if f"<tool>{frameworks.RESULT}" * 2 in prompt else CALLS if "<tools>" in prompt else TEXT
        )
        return super().updates(request)


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HEX_LLM_FRAMEWORKS names a folder that keeps them."""
    return Path(os.environ.get("HEX_LLM_FRAMEWORKS") or tmp_path_factory.mktemp("frameworks"))


def python_with(name: str, environments: Path) -> Path:
    folder = environments / name
    installed = folder / "installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=300)
        subprocess.run([folder / "bin/pip", "install", "--quiet", *PACKAGES[name]], check=True, timeout=1800)
        installed.touch()
    return folder / "bin/python"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(Caller("", byte_tokenizer(TEMPLATE))) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("name", frameworks.PROGRAMS)
def test_texts_calls_and_their_results(name: str, environments: Path, address: str) -> None:
    python = python_with(name.split()[0], environments)
    command = [python, frameworks.__file__, name, address]
    # LiteLLM would fetch a table of prices.
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    got = json.loads(ran.stdout.splitlines()[-1])
    calls = [["weather", {"place": "Röm"}], ["weather", {"place": "Bonn"}]]
    assert got["text"] == TEXT
    pieces = [piece for piece in got["pieces"] if piece]
    assert "".join(pieces) == TEXT
    assert len(pieces) > 3
    assert got["calls"] == got["streamed calls"] == calls
    assert got["end"] == END
    assert got["tokens"] == len(CALLS.encode())
