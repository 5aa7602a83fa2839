"""`bench` with a tiny model: against a real server of it, and without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from hex_llm.cli import main
from tests.test_serve import await_ready, serving, start

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip
ENGINE = ["--load_format=dummy", "--max_num_seqs", "2", "--num_blocks=64"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, and a token for each byte."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_conversations_find_their_prefix(model: str, tmp_path: Path) -> None:
    process = start(model, *ENGINE, "--port=0", "--enable_prefix_cache_hbm", "--prefix_cache_unit=block")
    path = tmp_path / "result.json"
    turns = ["--dataset-name=multi-turn", "--multi-turn-num-conversations=1", "--num-prompts=3"]
    lengths = ["--multi-turn-prefix-len=100", "--input-len=10", "--output-len=4"]
    save = ["--save-result", "--save-detailed", f"--result-filename={path}", "--disable-tqdm"]
    with serving(process) as (address, _):
        await_ready(process, address)
        assert main(["bench", "serve", f"--base-url={address}", *turns, *lengths, *save]) == 0
        process.terminate()
        assert process.wait(30) == 0
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (3, 0)
    lens = result["input_lens"]  # each turn's, with those before it and their answers
    assert 100 < lens[0] < lens[1] < lens[2]
    server = result["server"]
    assert 0.3 < server["prefix_cache_hit_rate"] < 1
    assert 0 < server["padding_share"] < 1
    assert server["late_compiles"] == server["preemptions"] == 0
    assert server["engine_steps"] > 3
    assert server["mean_queue_time_ms"] >= 0


def test_latency(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latency.json"
    sizes = [
        "--input-len=8",
        "--output_len=3",
        "--batch-size=2",
        "--num-iters-warmup=1",
        "--num-iters=2",
        "--disable-detokenize",
    ]
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
