"""`bench serve` against a real server of the default model, whose own numbers are in the result."""

from __future__ import annotations

import json
from pathlib import Path

from hex_llm.cli import main
from tests.test_serve import await_ready, serving, start


def test_conversations_find_their_prefix(tmp_path: Path) -> None:
    flags = ["--port=0", "--max_decode_seqs=2", "--max_model_len=512", "--num_blocks=64"]
    process = start(*flags, "--enable_prefix_cache_hbm", "--prefix_cache_unit=block")
    path = tmp_path / "result.json"
    turns = ["--dataset-name=multi-turn", "--multi-turn-num-conversations=2", "--num-prompts=6"]
    lengths = ["--multi-turn-prefix-len=100", "--input-len=10", "--output-len=4"]
    save = ["--save-result", "--save-detailed", f"--result-filename={path}", "--disable-tqdm"]
    with serving(process) as (address, _):
        await_ready(process, address)
        assert main(["bench", "serve", f"--base-url={address}", *turns, *lengths, *save]) == 0
        process.terminate()
        assert process.wait(30) == 0
    result = json.loads(path.read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["model_id"] == "SmolLM2-135M-Instruct"
    # Each turn has the ones before it and their answers, all of one length but for some tokens.
    lens = result["input_lens"]
    assert 100 < lens[0] < lens[2] < lens[4]
    server = result["server"]
    assert 0.3 < server["prefix_cache_hit_rate"] < 1
    assert 0 < server["padding_share"] < 1
    assert server["late_compiles"] > 0  # there was no warm-up
    assert server["engine_steps"] > 6
    assert server["mean_queue_time_ms"] >= 0
