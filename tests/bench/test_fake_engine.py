"""`bench` with an engine that has no model: behind a real server in a process of its own, and without one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from hex_llm.cli import main
from tests.server.fakes import FakeEngine, byte_tokenizer
from tests.test_serve import await_ready, serving, start_fake


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A token for each byte."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({one: i for i, one in enumerate(letters)}, [])
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.slow
def test_conversations_find_their_prefix(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    turns = ["--dataset-name=multi-turn", "--multi-turn-num-conversations=1", "--num-prompts=3"]
    lengths = ["--multi-turn-prefix-len=100", "--input-len=10", "--output-len=4", f"--tokenizer={tokenizer}"]
    save = ["--save-result", "--save-detailed", f"--result-filename={path}", "--disable-tqdm"]
    process = start_fake("__import__('tests.bench.fakes', fromlist=['*']).CachingEngine()")
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


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    engine.limits = replace(engine.limits, vocab_size=byte_tokenizer().vocab_size)  # ids above are faults
    monkeypatch.setattr("hex_llm.llm.load_engine", lambda config, progress: (engine, byte_tokenizer()))


@pytest.mark.usefixtures("fake_llm")
def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latency.json"
    sizes = [
        "--input-len=8",
        "--output_len=3",
        "--batch-size=2",
        "--num-iters-warmup=1",
        "--num-iters=2",
        "--disable-detokenize",
    ]
    assert (
        main(["bench", "latency", "--model=fake", *sizes, f"--output-json={path}", "--max_num_seqs", "2"])
        == 0
    )
    out = capsys.readouterr().out
    assert out.startswith("Avg latency: ")
    assert "99% percentile latency: " in out
    result = json.loads(path.read_text())
    assert result["model_id"] == "fake"
    assert len(result["latencies"]) == 2
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]


@pytest.mark.usefixtures("fake_llm")
def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "throughput.json"
    sizes = ["--num-prompts=6", "--input-len=8", "--output-len=3", "--num-warmups=1", "--n=2"]
    assert main(["bench", "throughput", "fake", *sizes, f"--output-json={path}", "--max_num_seqs", "2"]) == 0
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
