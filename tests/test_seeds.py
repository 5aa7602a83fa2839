"""The commands of guides that users come from, with ours in the place of theirs, where no cloud is needed.

Hex-LLM's documentation (its examples of arguments), vLLM's guide for Llama on TPUs, Hugging Face's for Llama
405B on Vertex AI. What they do on Vertex AI itself is in tests/deploy, dry.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import httpx
import pytest

from hex_llm.cli import main
from hex_llm.flags import parse
from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.live import live

HEX_LLM = {
    "multi-host": "--host=0.0.0.0 --port=7080 --model=meta-llama/Meta-Llama-3.1-70B --data_parallel_size=1 "
    "--tensor_parallel_size=16 --num_hosts=4 --hbm_utilization_factor=0.9",
    "prefix caching": "--host=0.0.0.0 --port=7080 --model=meta-llama/Llama-3.1-8B --data_parallel_size=1 "
    "--tensor_parallel_size=4 --hbm_utilization_factor=0.9 --enable_prefix_cache_hbm",
    "chunked prefill": "--host=0.0.0.0 --port=7080 --model=meta-llama/Llama-3.1-8B --data_parallel_size=1 "
    "--tensor_parallel_size=4 --hbm_utilization_factor=0.9 --enable_chunked_prefill",
    "notebook": "--model=google/gemma-2-9b-it --tensor_parallel_size=4 --hbm_utilization_factor=0.8 "
    "--max_running_seqs=512",
    "8B": "--model=meta-llama/Llama-3.1-8B-Instruct --tensor_parallel_size=4 --max_model_len=4096 "
    "--hbm_utilization_factor=0.95",
    "70B AWQ": "--model=hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4 --tensor_parallel_size=4 "
    "--max_model_len=4096 --hbm_utilization_factor=0.45",
}
DISAGGREGATED = (
    "--host=0.0.0.0 --port=7080 --model=meta-llama/Llama-3.1-8B --data_parallel_size=1 "
    "--tensor_parallel_size=2 --disagg_topo=3,1 --hbm_utilization_factor=0.9"
)
NOTEBOOK_ENVIRON = {"PJRT_DEVICE": "TPU", "MODEL_ID": "google/gemma-2-9b-it", "DEPLOY_SOURCE": "notebook"}
VLLM_SERVE = (
    "meta-llama/Llama-3.3-70B-Instruct --seed 42 --disable-log-requests --no-enable-prefix-caching "
    "--async-scheduling "
    "--gpu-memory-utilization 0.98 --max-num-batched-tokens 512 --max-num-seqs 256 --tensor-parallel-size 8 "
    "--max-model-len 2048"
)
VLLM_BENCH = (
    "bench serve --backend vllm --model meta-llama/Llama-3.3-70B-Instruct --dataset-name random --ignore-eos "
    "--num-prompts 8 --random-input-len=10 --random-output-len=10 --max-concurrency=4 --seed 100"
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(FakeBackend(byte_tokenizer())) as address:
        yield address


@pytest.mark.parametrize("name", HEX_LLM)
def test_hex_llms_arguments(name: str) -> None:
    words = shlex.split(HEX_LLM[name])
    engine, server = parse(words, NOTEBOOK_ENVIRON)
    given = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
    assert engine.model == given["model"]
    assert engine.hbm_utilization_factor == float(given["hbm_utilization_factor"])
    assert engine.tensor_parallel_size == int(given["tensor_parallel_size"])
    assert server.port == 7080
    assert engine.max_decode_seqs == (512 if name == "notebook" else None)
    assert engine.enable_prefix_cache_hbm is (True if name == "prefix caching" else None)
    assert engine.enable_chunked_prefill is (True if name == "chunked prefill" else None)


def test_disaggregated_serving() -> None:
    assert parse(shlex.split(DISAGGREGATED), {})[0].disagg_topo == "3,1"


def test_vllms_guide(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine, server = parse(shlex.split(VLLM_SERVE), {})
    assert (engine.seed, engine.tensor_parallel_size, engine.max_model_len) == (42, 8, 2048)
    assert (engine.max_num_batched_tokens, engine.max_decode_seqs) == (512, 256)
    assert (engine.hbm_utilization_factor, engine.enable_prefix_cache_hbm) == (0.98, False)
    assert server.disable_log_requests
    asked = {"prompt": "I love the mornings, because ", "max_tokens": 200, "temperature": 0}
    body = {"model": "meta-llama/Llama-3.3-70B-Instruct", **asked}
    reply = httpx.post(f"{address}/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["text"]
    assert main([*shlex.split(VLLM_BENCH), f"--base-url={address}"]) == 0
    printed = capsys.readouterr().out
    assert "============ Serving Benchmark Result ============" in printed
    assert "Successful requests:                     8" in printed
    assert "Median TPOT (ms):" in printed


def test_hugging_faces_guide(address: str) -> None:
    environ = {"MODEL_ID": "meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", "HUGGING_FACE_HUB_TOKEN": "hf_x",
               "HF_HUB_ENABLE_HF_TRANSFER": "1", "NUM_SHARD": "8"}  # fmt: skip
    engine, _ = parse([], environ)
    assert (engine.model, engine.hf_token, engine.tensor_parallel_size) == (environ["MODEL_ID"], "hf_x", 8)
    parameters = {"max_new_tokens": 128, "do_sample": True, "top_p": 0.95, "temperature": 0.7}
    instances = [{"inputs": "<|begin_of_text|>What's the Theory of Relativity?", "parameters": parameters}]
    reply = httpx.post(f"{address}/vertex", json={"instances": instances})
    assert reply.status_code == 200, reply.text
    [prediction] = json.loads(reply.text)["predictions"]
    assert isinstance(prediction, str)
