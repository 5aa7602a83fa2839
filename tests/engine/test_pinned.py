"""One server, one version of its model, though the hub's branches move on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from tests.text.corpus import train_byte_level
from tests.weights.hub_server import Hub, running

# The engine says what it would load, and waits until the branches have moved.
SERVER = """
import asyncio, sys, psutil
from hex_llm.config import EngineConfig
from hex_llm.frontend.client import EngineClient
from tests.server.fakes import fake_worker

LOAD = f'''(print(config.model, config.tokenizer, flush=True),
    [time.sleep(0.01) for _ in iter(lambda: Path({sys.argv[1]!r}).exists(), True)], FakeEngine())[-1]'''

async def serve():
    client = EngineClient(EngineConfig(model="org/m:a.gguf", tokenizer="org/t"), "m", fake_worker(LOAD))
    await client.start()
    print(client.tokenizer.chat_template, flush=True)
    psutil.Process().children()[0].kill()
    for ready in (False, True):
        while client.ready != ready:
            await asyncio.sleep(0.01)
    await client.stop(5)

asyncio.run(asyncio.wait_for(serve(), 60))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub()) as server:
        yield server


def publish(hub: Hub, version: str) -> tuple[str, str]:
    codec = train_byte_level(pre_tokenizers.ByteLevel(), ["</s>"], 300).to_str().encode()
    config = json.dumps({"eos_token": "</s>", "chat_template": version}).encode()
    model = hub.put("org/m", {"config.json": b"{}", "a.gguf": version.encode()})
    files = {"config.json": b"{}", "tokenizer.json": codec, "tokenizer_config.json": config}
    return model, hub.put("org/t", files)


def test_tokenizer_and_restarted_engines_are_of_the_first_commit(hub: Hub, tmp_path: Path) -> None:
    model, tokenizer = publish(hub, "first")
    moved = tmp_path / "moved"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": ""}
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(moved)], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        later = publish(hub, "second")
        moved.touch()
        said = process.stdout.read().splitlines()
    assert said == ["first", first.strip()], "the template, and what the second engine would load"
    assert first.split() == [f"org/m@{model}:a.gguf", f"org/t@{tokenizer}"]
    assert not [line for commit in later for line in hub.asked(commit)]
