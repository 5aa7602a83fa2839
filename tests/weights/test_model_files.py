"""A model's folder: its config is read or refused in one line, and nothing in it is ever run."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, ModelError
from hex_llm.models.families import model_spec
from hex_llm.weights.model_files import MAX_CONFIG_BYTES, open_model, open_tokenizer, read_config
from hex_llm.weights.source import fetch

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "eos_token_id": 2,
}
CANARY = "import pathlib; pathlib.Path(__file__).with_name('executed').touch()"


def put(folder: Path, values: Any, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(values if isinstance(values, bytes) else json.dumps(values).encode())
    return folder


def refusal(folder: Path, **options: bool) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(folder, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 300
    return message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "not valid JSON"),
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[1, 2]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
        (b" " * 20_000_000, f"larger than {MAX_CONFIG_BYTES >> 20} MiB"),
    ],
)
def test_a_broken_config(name: str, text: bytes, said: str, tmp_path: Path) -> None:
    put(tmp_path, CONFIG)
    put(tmp_path, text, name)
    message = refusal(tmp_path)
    assert message.startswith(name)
    assert said in message


@pytest.mark.parametrize("kind", ["nothing", "folder", "pipe", "dangling link"])
def test_no_config(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    {
        "nothing": lambda: None,
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "dangling link": lambda: path.symlink_to("nowhere"),
    }[kind]()
    assert "no config.json in the model's folder" in refusal(tmp_path)


def test_an_unreadable_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    put(tmp_path, CONFIG)
    for method in ("read_bytes", "is_file"):
        monkeypatch.setattr(Path, method, denied)
        assert refusal(tmp_path) == "config.json cannot be read (Permission denied): check its permissions"
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("generation", "eos"),
    [
        (None, 2),
        ({}, 2),
        ({"eos_token_id": None}, 2),
        ({"eos_token_id": 0}, 0),
        ({"eos_token_id": [3, 4]}, [3, 4]),
    ],
)
def test_the_end_ids_of_the_generation_config_win(generation: Any, eos: Any, tmp_path: Path) -> None:
    put(tmp_path, CONFIG)
    if generation is not None:
        put(tmp_path, generation, "generation_config.json")
    assert read_config(tmp_path) == {**CONFIG, "eos_token_id": eos}


def test_wrong_end_ids_of_the_generation_config_are_refused(tmp_path: Path) -> None:
    put(put(tmp_path, CONFIG), {"eos_token_id": "</s>"}, "generation_config.json")
    with pytest.raises(ModelError, match="eos_token_id='</s>'"):
        model_spec(open_model(tmp_path, config_only=True).config)


# ---- code in the folder


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """A model that brings code of its own."""
    code = {"AutoConfig": "configuration_x.Config", "AutoModelForCausalLM": "modeling_x.Model"}
    put(tmp_path, {**CONFIG, "auto_map": code})
    for name in ("configuration_x", "modeling_x", "tokenization_x", "__init__"):
        (tmp_path / f"{name}.py").write_text(CANARY)
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_code_is_no_obstacle_but_is_not_run(with_code: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        files = open_model(with_code)
    assert [record.message for record in caplog.records if "auto_map" in record.message]
    assert model_spec(files.config).vocab_size == 16
    assert files.checkpoint is not None
    assert sorted(files.checkpoint) == ["a"]
    assert not (with_code / "executed").exists()
    assert not any(name.endswith("_x") for name in sys.modules)


def test_an_unknown_architecture_is_told_the_nearest(with_code: Path) -> None:
    put(with_code, {**CONFIG, "architectures": ["Qwen3_5MoeForCausalLM"], "auto_map": {}})
    with pytest.raises(
        ModelError, match=r"'Qwen3_5MoeForCausalLM' is not supported; .* is Qwen3MoeForCausalLM"
    ):
        model_spec(open_model(with_code).config)


def test_the_text_of_a_model_with_vision_has_one_name(tmp_path: Path) -> None:
    put(tmp_path, {"text_config": {"tie_word_embeddings": True}})
    save_file(
        {name: np.zeros(2, np.float32) for name in ("model.language_model.norm.weight", "lm_head.weight")},
        tmp_path / "model.safetensors",
    )
    files = open_model(tmp_path)
    assert set(files.checkpoint or ()) == {
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    }
    assert files.config["text_config"]["tie_word_embeddings"] is False


def test_a_folder_may_be_called_like_a_gguf_file(tmp_path: Path) -> None:
    folder = put(tmp_path / "model.gguf", CONFIG)
    assert open_model(folder, config_only=True).config == CONFIG


def test_a_gguf_file_has_no_slow_tokenizer() -> None:
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    for open_one in (partial(open_tokenizer, path), open_model(path, config_only=True).open_tokenizer):
        assert open_one("auto").encode("hi")
        with pytest.raises(ConfigError, match=r"--tokenizer_mode=slow needs .*; use auto"):
            open_one("slow")
