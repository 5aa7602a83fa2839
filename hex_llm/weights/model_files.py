"""A model's folder or GGUF file, opened: its config, its checkpoint and its tokenizer. No jax, no devices."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hex_llm.errors import ConfigError, InvalidRequest, ModelError
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer, load_tokenizer
from hex_llm.weights.checkpoint import Checkpoint, text_name
from hex_llm.weights.gguf import GGUFFile, gguf_tokenizer, open_gguf
from hex_llm.weights.safetensors import open_safetensors

log = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 4 << 20
TEXT_HEAD = "language_model.lm_head.weight"
# Of generation_config.json: its names, and ours.
SAMPLED = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")} | {
    "max_new_tokens": "max_tokens"
}


@dataclass(frozen=True)
class ModelFiles:
    config: Mapping[str, Any]  # as in Hugging Face's config.json
    checkpoint: Checkpoint | None  # None: only the config was wanted
    open_tokenizer: Callable[[str], Tokenizer]  # by --tokenizer_mode
    path: Path


def open_model(path: Path, *, config_only: bool = False) -> ModelFiles:
    """Reads configs and headers only; nothing in the folder is ever executed."""
    if is_gguf(path):
        file = open_gguf(path)
        return ModelFiles(
            file.config, None if config_only else file.checkpoint, partial(_of_gguf, file), path
        )
    config = read_config(path)
    if "auto_map" in config:
        log.info("the model asks for code of its own (auto_map): the built-in architecture is used instead")
    checkpoint: Checkpoint | None = None if config_only else open_safetensors(path)
    # Models for embeddings are saved without a head, and without the name of what a head stands on.
    if checkpoint is not None and "embed_tokens.weight" in checkpoint:
        checkpoint = {f"model.{name}": tensor for name, tensor in checkpoint.items()}
    if checkpoint is not None and isinstance(text := config.get("text_config"), dict):
        # Configs tell badly whether it has a head of its own.
        checkpoint = {text_name(name): tensor for name, tensor in checkpoint.items()}
        config["text_config"] = {**text, "tie_word_embeddings": TEXT_HEAD not in checkpoint}
    match config.get("architectures"):
        case [str(name)] if name.endswith("Model"):
            config |= {"architectures": [f"{name[:-5]}ForCausalLM"], "tie_word_embeddings": True}
    return ModelFiles(config, checkpoint, partial(open_tokenizer, path), path)


def open_tokenizer(path: Path, mode: str = "auto") -> Tokenizer:
    return _of_gguf(open_gguf(path), mode) if is_gguf(path) else load_tokenizer(path, mode=mode)


def _of_gguf(file: GGUFFile, mode: str) -> Tokenizer:
    if mode == "slow":
        raise ConfigError(
            "--tokenizer_mode=slow needs the file tokenizer.model, which no GGUF file holds; use auto"
        )
    return gguf_tokenizer(file)


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and not path.is_dir()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the end-of-sequence ids of generation_config.json where there are any."""
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return config if eos is None else {**config, "eos_token_id": eos}


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Those of generation_config.json that vLLM takes too, by the names of SamplingParams."""
    path = folder / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    named = {SAMPLED[name]: value for name, value in values.items() if name in SAMPLED and value is not None}
    try:
        SamplingParams(**named)
    except InvalidRequest as error:
        raise ModelError(f"{path.name}: {error}; --generation_config=none does without it") from None
    return named


def read_json(path: Path, kind: type = dict) -> Any:
    try:
        if not path.is_file():
            raise ModelError(f"no {path.name} in the model's folder: is this a Hugging Face model?")
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path.name} is larger than {MAX_CONFIG_BYTES >> 20} MiB: not a config")
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read ({error.strerror}): check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: download the model again") from error
    if not isinstance(values, kind):
        raise ModelError(
            f"{path.name} must hold a JSON {'object' if kind is dict else 'list'}: download the model again"
        )
    return values
