"""The numbers that the documentation of Hex-LLM and of its like give, and what real runs take."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hex_llm.cli import main
from hex_llm.config import EngineConfig
from hex_llm.engine.loading import load_engine
from hex_llm.flags import spellings
from hex_llm.planning.footprint import footprint, opened_model
from hex_llm.weights.source import fetch
from tests.tiny import FAMILIES, Tiny
from tests.weights.hub_server import Hub, running
from tools.tpu_models import MODELS

Plan = Callable[..., Any]
SAVED = {tiny.name: tiny for tiny in FAMILIES}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("8b", (16, 8, 8, 4)),
        ("405b", (810, 405, 405, 203)),
        pytest.param("70b", (140, 70, 70, 35), marks=pytest.mark.slow),
    ],
)
def test_the_table_of_memory_by_type(plan: Plan, name: str, sizes: tuple[int, ...]) -> None:
    told = plan(name)["least_gb"]
    assert tuple(told.values()) == sizes
    assert list(told) == ["bf16", "fp8", "int8", "int4"]


@pytest.mark.parametrize(
    ("name", "machine", "topology", "num_devices", "num_hosts"),
    [("8b", "ct5lp-hightpu-4t", "2x2", 4, 1), ("70b", "ct5lp-hightpu-4t", "4x4", 16, 4)],
)
def test_the_slice_that_the_documentation_names(
    plan: Plan, name: str, machine: str, topology: str, num_devices: int, num_hosts: int
) -> None:
    told = plan(name, "--on=v5e")
    (option,) = told["options"]
    assert (option["machine_type"], option["topology"]) == (machine, topology)
    assert f"{machine}, {topology}: --tensor_parallel_size={num_devices}" in told["steps"][2]
    assert option["num_hosts"] == num_hosts
    flags = option["flags"]
    assert {f"--tensor_parallel_size={num_devices}", "--max_model_len=4096"} <= set(flags)
    assert (f"--num_hosts={num_hosts}" in flags) == (num_hosts > 1)
    assert 0.9 <= float(flags[-1].removeprefix("--hbm_utilization_factor=")) <= 0.95
    assert option["weights_bytes"] + option["temporary_bytes"] < option["usable_bytes"]
    assert option["max_concurrency"] >= 16
    assert all("v5e-" in one for one in told["does_not_fit"])


def test_awq_on_four_chips_by_the_rule_and_what_this_server_holds(plan: Plan) -> None:
    told = plan("70b-awq", "--on=v5e,A100-80GB,L4")
    assert "ct5lp-hightpu-4t, 2x2: --tensor_parallel_size=4" in told["steps"][2]
    assert "35 GB" in told["steps"][1]
    gpu = next(one for one in told["options"] if one["name"] == "A100-80GB-1")
    assert 36e9 < gpu["weights_bytes"] < 41e9, "4.25 bits each, and the tables as floats"
    gpus = next(one for one in told["options"] if one["name"] == "L4-4")
    assert 9e9 < gpus["weights_bytes"] < 10.25e9, "a quarter of that on each"
    tpu = next(one for one in told["options"] if one["name"] == "v5e-4")
    assert 10e9 < tpu["weights_bytes"] < 11e9, "of each chip; the compiler says 10.7"


def test_405b_in_8_bits_on_one_machine_of_8(plan: Plan) -> None:
    told = plan("405b-fp8", "--on=H100,A100-80GB-8,v5e-1,H200")
    assert [one["machine_type"] for one in told["options"]] == ["a3-ultragpu-8g", "a3-highgpu-8g"]
    assert "8 bits" in told["does_not_fit"]["A100-80GB-8"]
    assert "411.2 GB" in told["does_not_fit"]["v5e-1"], "8 bits there too"
    assert "H100-4" in told["does_not_fit"]


@pytest.mark.parametrize(("concurrency", "floor_ms"), [(1, 3.17), (64, 5.75), (256, 13.6)])
def test_times_start_from_the_floor(plan: Plan, concurrency: int, floor_ms: float) -> None:
    """Known floors of a step on one H200, at 1,500 tokens of context; here it is an eighth of one."""
    (option,) = plan("8b", "--on=H200", f"--concurrency={concurrency}")["options"]
    assert option["tpot_floor_s"] * 8e3 == pytest.approx(floor_ms, rel=0.05)
    assert option["tpot_s"] > option["tpot_floor_s"]
    cost = option["price_per_hour"] / (option["output_tokens_per_s"] * 3600) * 1e6
    assert option["dollars_per_million_output_tokens"] == pytest.approx(cost)


@pytest.mark.parametrize(
    ("tiny", "flags"),
    [
        pytest.param(None, {}, marks=pytest.mark.slow),
        pytest.param(None, {"quantization": "none"}, marks=pytest.mark.slow),
        ("llama3", {"tensor_parallel_size": 4}),
        ("gemma2-9b", {"enable_lora": True, "max_loras": 2}),
        ("qwen3-moe", {"tensor_parallel_size": 2}),
        ("qwen2-tied", {"dtype": "bfloat16", "tensor_parallel_size": 2}),
    ],
)
def test_a_real_run_takes_what_was_planned(tiny: str | None, flags: dict[str, Any], tmp_path: Path) -> None:
    if tiny is not None:
        SAVED[tiny].save(tmp_path)
    model = None if tiny is None else str(tmp_path)
    config = EngineConfig(
        model=model,
        skip_tokenizer_init=tiny is not None,
        max_model_len=64,
        num_blocks=16,
        warmup=False,
        **flags,
    )
    with opened_model(config) as opened:
        planned = footprint(opened, "cpu", config.tensor_parallel_size, usable=1e9, context=64)
    memory = load_engine(config)[0].memory
    held, kv = (float(size) * 2**20 for size in re.findall(r"(?:weights|KV cache) ([\d.]+) MiB", memory))
    assert planned.weights == pytest.approx(held, rel=0.05, abs=0.06 * 2**20)
    assert planned.per_token * 17 * 32 == pytest.approx(kv, rel=0.05, abs=0.06 * 2**20)


TABLE = re.compile(r"^\| ([^|]*), v\de \dx\d \| decode \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) /", re.M)


def test_the_compilers_own_figures(tmp_path: Path) -> None:
    """Those of docs/kernels.md: bytes of a chip, by the TPU compiler, for models in bfloat16."""
    rows = TABLE.findall(Path("docs/kernels.md").read_text())
    assert len(rows) >= 9
    for name, *row in rows:
        model = MODELS[name.lower()]
        weights, pages, everything = (float(gb) * 1e9 for gb in row)
        (tmp_path / "config.json").write_text(json.dumps(model.config))
        sizes = {"max_decode_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 8192}
        with opened_model(EngineConfig(model=str(tmp_path), **sizes)) as opened:
            found = footprint(opened, "tpu", math.prod(model.sides), usable=17e9, context=8192)
        held = found.weights, 98304 * found.per_token
        assert held == pytest.approx((weights, pages), rel=0.01, abs=1e7), name
        assert sum(held) + found.temporaries == pytest.approx(everything, rel=0.05), name


SCRIPT = """
import sys
from hex_llm.cli import main
codes = [main(["plan", repo, "--json", "--on=L4-1"]) for repo in ("org/sharded", "org/gguf", "org/absent")]
sys.exit(f"codes {codes}")
"""


def test_headers_of_the_hub_are_enough(tmp_path: Path) -> None:
    """In ranges: not one whole file of weights is asked for, sharded or GGUF."""
    saved = tmp_path / "saved"
    Tiny("", "LlamaForCausalLM", {"hidden_size": 512, "vocab_size": 2048}).save(saved, max_shard_size="3MB")
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    gguf = fetch(None, cache_dir=EngineConfig().cache_dir)
    with running(Hub()) as hub:
        hub.put("org/sharded", files)
        hub.put("org/gguf", {"model.gguf": gguf.read_bytes(), "README.md": b""})
        patience = {"HF_HUB_ETAG_TIMEOUT": "100", "HF_HUB_DOWNLOAD_TIMEOUT": "100"}  # on a busy machine
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "", **patience}
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120)
        large = [line for line in hub.log if ".safetensors " in line or ".gguf" in line]
    assert "the hub has no model 'org/absent'" in done.stderr
    assert done.stderr.endswith("codes [0, 0, 1]\n"), done.stderr
    sharded, default = json.loads(f"[{done.stdout.replace(chr(10) + '}' + chr(10) + '{', '},{')}]")
    assert large
    assert all("bytes=0-" in line for line in large)
    assert sharded["options"][0]["weights_bytes"] == 2 * sharded["num_parameters"]
    assert default["options"][0]["weights_bytes"] == pytest.approx(92.1 * 2**20, rel=0.05)
    assert default["bits"] == 6


def test_every_flag_of_the_server_counts_and_is_passed_on(plan: Plan) -> None:
    sizes = {}
    for dtype in spellings()["kv_cache_dtype"].flag.choices:
        (option,) = plan("8b", "--on=H100-8", f"--kv-cache-dtype={dtype}")["options"]
        sizes[dtype] = option["kv_bytes_per_token"]
        assert f"--kv_cache_dtype={dtype}" in option["flags"]
    assert sizes["auto"] == sizes["bfloat16"] == sizes["float16"] == 16384
    assert sizes["float32"] == 2 * sizes["auto"]
    assert sizes["int8"] == sizes["fp8"] == sizes["fp8_e4m3"] == sizes["auto"] * 33 / 64
    plain, adapted = (
        plan("8b", "--on=L4", "--tensor-parallel-size=4", *more)["options"][0]
        for more in ((), ("--enable_lora", "--max_loras=4"))
    )
    assert plain["name"] == "L4-4"
    assert adapted["weights_bytes"] > plain["weights_bytes"], "the slots of adapters"
    assert "--enable_lora=True" in adapted["flags"]


def test_the_cache_is_not_larger_than_the_engine_would_make_it(plan: Plan) -> None:
    (option,) = plan("8b", "--on=H200", "--max_decode_seqs=20", "--max_model_len=1000")["options"]
    assert option["kv_tokens"] == 20 * 1024


def test_the_user_prices(plan: Plan, tmp_path: Path) -> None:
    """A file that says nothing else."""
    (own := tmp_path / "own.toml").write_text('prices = "ours of May"\n[v6e]\nprice = 0.27\n')
    usual, cheap = (plan("8b", "--on=v6e", *more) for more in ((), (f"--machines={own}",)))
    assert (usual["prices"][:16], cheap["prices"]) == ("examples of 2025", "ours of May")
    costs = [told["options"][0]["dollars_per_million_output_tokens"] for told in (usual, cheap)]
    assert costs[1] == pytest.approx(costs[0] / 10)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--on=v5e-4,L4"], "the model fits on none of v5e-4, L4-1, L4-2, L4-4, L4-8; on L4-8: "),
        (["--on=v9"], "--on=v9: no such chip or slice; there are v5e, v6e, v5p, v7x, H100,"),
        (["--machines=none.toml"], "--machines=none.toml: [Errno 2] No such file"),
        (["--contextt=3"], "--contextt: unknown flag"),
        (["--kv-cache-dtype=int3"], "--kv-cache-dtype=int3: must be one of auto, bfloat16,"),
        (["--num_hosts=2"], "--num_hosts: a plan is of one replica"),
        (["--on=v5e", "--tensor_parallel_size=3"], "--tensor_parallel_size=3: there is no such slice"),
        (["--on=v5p", "--concurrency=300"], "256 sequences run at once, not 300: --max_decode_seqs"),
        (["--on=v5p", "--compile"], "--compile: there is no TPU compiler here: No module"),
        (["--on=H200", "--compile"], "--compile: H200-8 is no TPU"),
    ],
)
def test_what_cannot_be_planned(
    flags: list[str],
    message: str,
    config: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hex_llm.planning.compile.find_spec", lambda name: None)
    assert main(["plan", config("405b"), *flags]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_the_text_has_all_of_it(config: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    model = config("8b")
    assert main(["plan", model, "--on=v5e,L4"]) == 0
    text = capsys.readouterr().out
    for part in (
        "weights, at least: bf16 16 GB, fp8 8 GB, int8 8 GB, int4 4 GB",
        "\n2. memory, at least: 8 * (16 / 8) = 16 GB",
        "v5e-1: 16.1 of 16.9 GB are weights",
        f"hex-llm serve {model} --tensor_parallel_size=",
        "aiplatform.Model.upload(",
        "model.deploy(\n    endpoint=endpoint,",
        "gcloud ai models upload",
        "gcloud container node-pools create",
        "kubectl apply -k deploy/kubernetes/gpu",
    ):
        assert part in text, part


def test_the_commands_of_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--on=L4"]) == 0
    text = capsys.readouterr().out
    assert "hex-llm serve --tensor_parallel_size=1" in text
    assert "gcloud compute instances create hex-smollm2-135m-instruct --zone" in text
    assert "MODEL_ID" not in text  # it would be looked for on the hub


def test_a_file_of_machines_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own := tmp_path / "own.toml").write_text('[x]\nplatform = "tpu"\nhbm = -1\n')
    assert main(["plan", "--machines", str(own)]) == 2
    assert f"--machines={own}: " in capsys.readouterr().err
