"""`bench latency` and `throughput` with a tiny model, and `bench serve` against a server of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hex_llm.cli import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
ENGINE = ["--load_format=dummy", "--disable-detokenize", "--max_num_seqs", "4", "--num_blocks=64"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_latency(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latency.json"
    sizes = ["--input-len=8", "--output_len=3", "--batch-size=2", "--num-iters-warmup=1", "--num-iters=2"]
    assert main(["bench", "latency", f"--model={model}", *sizes, f"--output-json={path}", *ENGINE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Avg latency: ")
    assert "99% percentile latency: " in out
    result = json.loads(path.read_text())
    assert result["model_id"] == model
    assert len(result["latencies"]) == 2
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


def test_throughput(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "throughput.json"
    sizes = ["--num-prompts=6", "--input-len=8", "--output-len=3", "--num-warmups=1", "--n=2"]
    assert main(["bench", "throughput", model, *sizes, f"--output-json={path}", *ENGINE]) == 0
    out = capsys.readouterr().out
    assert "requests/s, " in out
    assert "Total num prompt tokens:  48\nTotal num output tokens:  36\n" in out
    assert json.loads(path.read_text())["total_num_tokens"] == 84


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latency", "--port=3"], "error: --port: only the server takes it\n"),
        (["latency", "--bogus"], "error: --bogus: unknown flag; "),
        (["latency", "--batch-size=0"], "error: --batch-size: must be at least 1, not 0\n"),
        (
            ["throughput", "--dataset-name=mixture"],
            "error: --dataset-name mixture: only a server can be asked",
        ),
        (["servee"], "error: servee: unknown command; did you mean serve?\n"),
    ],
)
def test_wrong_flags_are_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *argv]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("command", ["serve", "compare", "latency", "throughput"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", command, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: hex-llm bench {command}")
