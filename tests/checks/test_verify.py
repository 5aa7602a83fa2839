"""Models that agree with transformers, and some that were made wrong on purpose."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hex_llm.cli import main
from tests.adapted import Judge
from tests.models.test_quantized import BY_NAME, LLAMA, quantize
from tests.tiny import FAMILIES

TINY = {tiny.name: tiny for tiny in FAMILIES}


def verify(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[int, Any, str]:
    code = main(["verify", *map(str, argv), "--json", "--num-tokens=12", "--skip_tokenizer_init"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else None, printed.err


def spoiled(folder: Path, name: str) -> Path:
    """A copy of which one tensor is another."""
    copy = shutil.copytree(folder, folder.with_name("spoiled"))
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = tensors[name] + 0.05
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize(
    "name", ["llama3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gemma2-9b", "qwen3-moe"))]
)
def test_models_that_agree(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TINY[name].save(tmp_path)
    code, told, _ = verify(capsys, tmp_path)
    assert code == 0
    assert max(told["differences"].values()) < 1e-4
    assert told["tokens_agreeing"] == told["tokens"] == 36
    assert told["first_differing"] is None


@pytest.mark.parametrize(
    ("tensor", "layer"),
    [
        pytest.param("model.embed_tokens.weight", -1, marks=pytest.mark.slow),
        ("model.layers.2.mlp.down_proj.weight", 2),
        pytest.param("model.norm.weight", 3, marks=pytest.mark.slow),
    ],
)
def test_the_layer_that_is_wrong_is_found(
    tensor: str, layer: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The final norm is told with the last layer, behind which it stands."""
    TINY["gemma2-9b"].save(tmp_path / "right", safe_serialization=True)
    wrong = spoiled(tmp_path / "right", tensor)
    code, told, error = verify(capsys, wrong, "--reference", tmp_path / "right")
    assert code == 1
    assert told["first_differing"] == layer
    where = "the embedding" if layer == -1 else f"layer {layer}"
    assert f"error: {where} is the first that differs, by " in error


@pytest.mark.slow
def test_a_quantized_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA.save(tmp_path / "model")
    expanded = quantize(tmp_path / "model", BY_NAME["awq-64"])
    code, told, _ = verify(capsys, tmp_path / "model", "--reference", expanded)
    assert (code, told["quantized"]) == (0, True)
    assert 0 < max(told["differences"].values()) < 1e-2


@pytest.mark.slow
def test_an_adapted_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It agrees with peft, and the model without it does not."""
    model = TINY["llama3"].save(tmp_path / "model")
    adapter = Judge(model).add("a", tmp_path)
    kept = tmp_path / "expected.npz"
    assert (
        main(["verify", str(tmp_path / "model"), f"--lora={adapter}", f"--save={kept}", "--num-tokens=12"])
        == 0
    )
    capsys.readouterr()
    code, told, _ = verify(capsys, tmp_path / "model", "--lora", adapter, "--against", kept)
    assert code == 0
    assert told["tokens_agreeing"] == 36
    code, told, _ = verify(capsys, tmp_path / "model", "--against", kept)
    assert (code, told["first_differing"]) == (1, 0)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["/none"], 1, "there is no file or folder '/none'"),
        (["--against=/none"], 2, "--against=/none: no file that --save has written"),
        (["--tolerance=0"], 2, "must be more than 0"),
        (["--num_tokns=2"], 2, "--num-tokns: unknown flag"),
    ],
)
def test_wrong_commands(
    flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *flags]) == code
    assert message in capsys.readouterr().err


def test_without_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    TINY["llama3"].save(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["verify", str(tmp_path)]) == 2
    assert "transformers is not installed: pip install torch transformers" in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--prompt=The capital of France is"]) == 0
    assert "greedy search: 32 of 32 tokens are transformers'" in capsys.readouterr().out
