"""The server on models that it cannot serve: one line, an exit code, no traceback, soon; nothing is run."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hex_llm.engine.loading import load_engine
from hex_llm.errors import HexError
from hex_llm.flags import parse
from hex_llm.models.families import model_spec
from hex_llm.models.params import abstract_weights, declared
from hex_llm.weights.safetensors import INDEX

ROOT = Path(__file__).parent.parent
LIMIT_S = 40  # of processor time; 16 of it if kernels must be compiled first
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FLAGS = ("--skip_tokenizer_init", "--no-warmup", "--num_blocks=8")
LOG_LINE = r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: .*|Loading weights: .*|"


def configure(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


def tensors() -> dict[str, np.ndarray]:
    params = declared(abstract_weights(model_spec(CONFIG)))
    return {piece.name: np.ones(piece.shape, np.float32) for param in params for piece in param.pieces}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that could be served."""
    folder = tmp_path / "model"
    folder.mkdir()
    configure(folder)
    save_file(tensors(), folder / "model.safetensors")
    return folder


def _children_s() -> float:
    """The processor time of all that ran and ended, however busy the machine is."""
    return sum(os.times()[2:4])


def run(model: Path, *flags: str, python: tuple[str, ...] = (), **environ: str) -> tuple[int, str]:
    """Exit code and stderr."""
    command = [sys.executable, *python, "-m", "hex_llm.server.api_server", "--model", str(model)]
    command += ["--port=0", "--host=127.0.0.1", *FLAGS, *flags]
    before = _children_s()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=120
    )
    assert _children_s() - before < LIMIT_S
    assert done.stdout == ""
    return done.returncode, done.stderr


def the_error(output: tuple[int, str]) -> str:
    """The one line that is not a log's."""
    code, stderr = output
    lines = [line for line in re.split("[\r\n]+", stderr) if not re.fullmatch(LOG_LINE, line)]
    assert code in (1, 2)
    assert len(lines) == 1, stderr
    assert lines[0].startswith("error: ")
    assert len(lines[0]) < 400
    return lines[0]


# ---- what is done to the folder


def damage(folder: Path, change: Callable[[bytes], bytes]) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


def overlap(data: bytes) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    first, second, *_ = (name for name, entry in header.items() if entry["shape"] == [16])
    header[first]["data_offsets"] = header[second]["data_offsets"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def shard(folder: Path, name: str, place: str) -> None:
    index = {**dict.fromkeys(tensors(), "model.safetensors"), name: place}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))


class Canary:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("executed",)


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary()))


def whole_numbers(folder: Path) -> None:
    values = {
        name: value.astype(np.int64) if "q_proj" in name else value for name, value in tensors().items()
    }
    save_file(values, folder / "model.safetensors")


def quantized(folder: Path, lost: str = "", **changes: Any) -> None:
    """AWQ, as far as its names and shapes go."""
    configure(folder, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 8, **changes})
    values = tensors()
    inputs, outputs = values.pop(Q).shape[::-1]
    name = Q.removesuffix("weight")
    values[f"{name}qweight"] = np.zeros((inputs, outputs // 8), np.int32)
    values[f"{name}qzeros"] = np.zeros((inputs // 8, outputs // 8), np.int32)
    values[f"{name}scales"] = np.zeros((inputs // 8, outputs), np.float16)
    values.pop(f"{name}{lost}", None)
    save_file(values, folder / "model.safetensors")


def gguf(folder: Path, kind: int) -> None:
    """A file of one tensor whose data is missing."""
    for path in folder.iterdir():
        path.unlink()
    tensor = struct.pack("<Q6sIQIQ", 6, b"t.bias", 1, 1024, kind, 0)
    (folder / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor)


Q = "model.layers.0.self_attn.q_proj.weight"
CASES: dict[str, tuple[Callable[[Path], Any], str, tuple[str, ...]]] = {
    "truncated": (
        lambda f: damage(f, lambda data: data[:-1]),
        "model.safetensors' is broken or cut short",
        (),
    ),
    "overlapping": (lambda f: damage(f, overlap), "model.safetensors' is broken or cut short", ()),
    "whole numbers": (whole_numbers, f"tensor '{Q}' holds I64", ()),
    "missing shard": (lambda f: shard(f, Q, "model-2.safetensors"), "'model-2.safetensors' is missing", ()),
    "index outside": (lambda f: shard(f, Q, "../x.safetensors"), "points outside the folder", ()),
    "only pickles": (only_pickles, "only PyTorch files", ()),
    "unknown": (lambda f: configure(f, architectures=["Mamba"]), "'Mamba' is not supported", ()),
    "wrong shape": (lambda f: configure(f, vocab_size=33), "embed_tokens.weight has shape [32, 16]", ()),
    "absurd sizes": (lambda f: configure(f, num_hidden_layers=10**9), "num_hidden_layers=1000000000", ()),
    "too large": (
        lambda f: configure(f, num_hidden_layers=200, hidden_size=1 << 17, head_dim=128),
        "GiB",
        ("--load_format=dummy",),
    ),
    "gguf cut short": (lambda f: gguf(f, 0), "damaged or cut short", ()),
    "gguf of an unknown type": (lambda f: gguf(f, 99), "unsupported type number 99", ()),
    "unknown quantization": (
        lambda f: quantized(f, quant_method="aqlm"),
        "quant_method='aqlm' is not supported",
        (),
    ),
    "unknown bits": (lambda f: quantized(f, bits=3), "bits=3 is not supported", ()),
    "odd groups": (lambda f: quantized(f, group_size=24), "group_size=24 does not divide its 16 inputs", ()),
    "no scales": (lambda f: quantized(f, "scales"), "lacks 'model.layers.0.self_attn.q_proj.scales'", ()),
    "no zeros": (lambda f: quantized(f, "qzeros"), "lacks 'model.layers.0.self_attn.q_proj.qzeros'", ()),
    "another quantization": (quantized, "config.json says awq", ("--quantization=fp8",)),
    "too many devices": (lambda f: None, "only 8 cpu device(s)", ("--tensor_parallel_size=16",)),
    "odd devices": (lambda f: None, "can be split over 1, 2, 4 devices", ("--tensor_parallel_size=3",)),
}


# In processes of their own: what fails at each step of loading. To a server the others are like one of these.
TOLD = {"truncated", "only pickles", "unknown", "odd devices"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in TOLD else pytest.mark.slow) for case in CASES]
)
def test_one_line(case: str, model: Path) -> None:
    change, said, flags = CASES[case]
    change(model)
    before = sorted(model.iterdir())
    assert said in the_error(run(model, *flags))
    assert sorted(model.iterdir()) == before
    assert not (ROOT / "executed").exists()


@pytest.mark.parametrize("case", [case for case in CASES if case not in TOLD])
def test_one_line_of_the_engine(case: str, model: Path) -> None:
    change, said, flags = CASES[case]
    change(model)
    before = sorted(model.iterdir())
    config, _ = parse([f"--model={model}", *FLAGS, *flags], {})
    with pytest.raises(HexError) as caught:
        load_engine(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 390
    assert sorted(model.iterdir()) == before


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "there is no file or folder" in the_error(run(tmp_path / "none"))


NOT_RUN = ["only pickles", pytest.param("index outside", marks=pytest.mark.slow)]


@pytest.mark.parametrize("case", NOT_RUN)
def test_the_same_without_asserts(case: str, model: Path) -> None:
    change, said, _ = CASES[case]
    change(model)
    assert said in the_error(run(model, python=("-O",)))
    assert not (ROOT / "executed").exists()


def test_a_traceback_when_it_is_asked_for(model: Path) -> None:
    configure(model, hidden_size=-1)
    code, stderr = run(model, HEX_LLM_VERBOSE_LOG="true")
    assert code == 1
    assert "Traceback (most recent call last)" in stderr
    assert re.search(r"^error: config.json: hidden_size=-1 ", stderr, re.MULTILINE)
