"""`make tpu-compile`: models lower for TPUs here, and programs are measured, tried on CPUs."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import jax
import pytest

from hex_llm.execution import programs
from hex_llm.execution.slots import SlotLayout
from hex_llm.kernels import experts, reference
from hex_llm.kernels.attention import AttentionKernels
from hex_llm.kernels.experts import ExpertKernels
from hex_llm.models.families import model_spec
from hex_llm.models.params import abstract_weights
from hex_llm.parallel.shardings import make_mesh
from hex_llm.planning.compile import Sizes, described_weights
from tools import tpu_compile, tpu_hlo
from tools.tpu_compile import Job, Row
from tools.tpu_models import MODELS

SMALL = Sizes(batch=4, context=16, prefill=32, tokens=256, block_size=16, max_len=64)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "head_dim": 128,
}
ROW = Row("tiny", "decode", weights=1e9, pages=1e9, hbm=2e9, floor_s=1e-3)


NEWER = ("qwen3-0.6b", "qwen3-30b-a3b", "gemma-3-27b", "gemma-4-31b", "gpt-oss-120b", "llama-3.3-70b")
DIVIDED = ("llama-3.1-8b-disagg", "llama-3.1-70b-awq-disagg")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in NEWER + DIVIDED)) for name in MODELS]
)
def test_a_layer_of_every_model_lowers_with_the_kernel(name: str) -> None:
    options = tpu_compile.arguments(["--layers=1"])
    sizes = Sizes(batch=8, context=64, prefill=64, tokens=4096, block_size=32, max_len=4096)
    row = tpu_compile.run_here(f"{name}/decode", sizes, options, can_compile=False)
    assert not row.fault
    num_calls = 5 if "awq" in name else 1  # attention, and products with quantized matrices
    assert f"{num_calls} calls of the kernel" in row.exchanges
    assert row.compiled_s is None
    assert "not known" in tpu_compile.line(row)


def test_programs_of_groups() -> None:
    """Those that prefill run other programs than those that decode, each group on devices of its own."""
    options = Namespace(models="llama-3.1-8b,llama-3.1-8b-disagg", programs="prefill,take,decode,put")
    name = "llama-3.1-8b"
    prefilling = [f"{name}-disagg/{kind}@{group}" for kind in ("prefill", "take") for group in range(3)]
    expected = {
        f"{name}/prefill",
        f"{name}/decode",
        *prefilling,
        *(f"{name}-disagg/{k}@3" for k in ("decode", "put")),
    }
    assert set(tpu_compile.labels(options)) == expected
    assert tpu_compile.mesh_of(MODELS[f"{name}-disagg"], group=3).size == 2
    options = tpu_compile.arguments(["--layers=1"])
    row = tpu_compile.run_here(f"{name}-disagg/put@3", SMALL, options, can_compile=False)
    assert (row.fault, row.program) == ("", "put@3")


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b"])
def test_a_step_with_adapters_lowers(name: str) -> None:
    options = tpu_compile.arguments(["--layers=1"])
    sizes = Sizes(batch=8, context=64, prefill=64, tokens=4096, block_size=32, max_len=4096)
    row = tpu_compile.run_here(f"{name}/adapted", sizes, options, can_compile=False)
    assert not row.fault
    assert "1 calls of the kernel" in row.exchanges


def test_what_adapters_exchange() -> None:
    """No weight moves, and their sums travel with those of the step."""
    spec = model_spec(TINY, max_model_len=64).split_over(4)
    mesh = make_mesh(4, jax.devices("cpu"))
    seen: Any = tpu_compile.mesh_of(MODELS["llama-3.1-8b"])
    layout = SlotLayout(SMALL.batch + 1, SMALL.max_len, spec.vocab_size, table_width=4)
    kernels = (
        programs.split_by_head(AttentionKernels(reference.paged_attention), seen),
        programs.split_by_width(ExpertKernels(experts.choose, experts.dense), seen),
    )
    setting = programs.ProgramContext(spec, mesh, layout, SMALL.batch, *kernels)
    weights = described_weights(abstract_weights(spec), mesh, "TPU v5 lite")
    compiled = (
        tpu_compile.described(setting, weights, SMALL)["adapted"]
        .traced("default")
        .lower()
        .compile()
        .as_text()
    )
    assert tpu_hlo.collectives(compiled) == {"all-reduce": 7}


@pytest.mark.parametrize(
    ("name", "calls"),
    [("mixtral-8x7b", 4), ("llama-4-scout", 5), ("gemma-4-26b-a4b", 10), ("llama-3.3-70b", 6)],
)
def test_products_of_many_tokens_lower_with_their_kernels(name: str, calls: int) -> None:
    """Attention of decodes and of chunks, two products of routed experts, and on a v6e those of what is not
    routed, where widths are whole lanes. Of two layers, which Scout and Gemma have of two kinds: the last
    feed-forward sees few tokens."""
    options = tpu_compile.arguments(["--layers=2"])
    sizes = Sizes(batch=8, context=64, prefill=512, tokens=4096, block_size=32, max_len=4096)
    row = tpu_compile.run_here(f"{name}/prefill", sizes, options, can_compile=False)
    assert not row.fault
    assert f"{calls} calls of the kernel" in row.exchanges


def test_parts_lower_with_the_kernel() -> None:
    options = Namespace(layouts="default", dump=None, models="", programs="parts")
    heads_that_lie_apart = tpu_compile.labels(options)[1]
    row = tpu_compile.run_here(heads_that_lie_apart, SMALL, options, can_compile=False)
    assert not row.fault
    assert row.exchanges.split()[2] == "2", "calls of the kernel"


@pytest.mark.parametrize("layouts", ["default", "auto"])
def test_what_is_read_from_a_compiled_step(layouts: str, tmp_path: Path) -> None:
    spec = model_spec(TINY, max_model_len=64).split_over(4)
    mesh = make_mesh(4, jax.devices("cpu"))
    # The mesh that attention is divided over says which chip it is; devices are given by the arguments alone.
    seen: Any = tpu_compile.mesh_of(MODELS["llama-3.1-8b"])
    attention_kernels = programs.split_by_head(AttentionKernels(reference.paged_attention), seen)
    layout = SlotLayout(SMALL.batch + 1, SMALL.max_len, spec.vocab_size, table_width=4)
    expert_kernels = programs.split_by_width(ExpertKernels(experts.choose, experts.dense), seen)
    setting = programs.ProgramContext(spec, mesh, layout, SMALL.batch, attention_kernels, expert_kernels)
    weights = described_weights(abstract_weights(spec), mesh, "TPU v5 lite")
    program = tpu_compile.described(setting, weights, SMALL)["decode"]
    options = Namespace(layouts=layouts, dump=tmp_path, bundles=None)
    job = Job("tiny-decode", program, ROW, MODELS["llama-3.1-8b"].chip, options)
    job.run(can_compile=True)
    assert not job.row.fault
    assert "7 all-reduce (2.33 a layer)" in job.row.exchanges, "two a layer, and the embedding's"
    held = tpu_compile.local_bytes(program.arguments[:2])
    assert job.row.total is not None
    assert job.row.total > held
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny-decode.hlo.gz"]


@pytest.mark.parametrize(
    ("child", "limit", "fault"),
    [
        ("import time; time.sleep(60)", 0.5, "no result after 0 s"),
        ("import os; os.abort()", 60, "ended with code -6: "),
        ("import sys; sys.exit('F1115 15:50:02.2 8 sort.cc:1] It broke.')", 60, "code 1: It broke."),
    ],
)
def test_a_compiler_may_hang_or_abort(
    child: str, limit: float, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **how: run([sys.executable, "-c", child], **how))
    row = tpu_compile.run_apart("llama-3.1-8b/decode", Namespace(limit=limit))
    assert (row.model, row.program) == ("llama-3.1-8b", "decode")
    assert fault in row.fault
    assert fault in tpu_compile.line(row)


def test_a_program_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Here it is only lowered."""
    options = tpu_compile.arguments(["--layers=1", "--batch=8", "--max-len=4096", f"--dump={tmp_path}"])
    for program in ("choice", "logits"):
        row = tpu_compile.run_apart(f"llama-3.1-8b/{program}", options)
        assert not row.fault
        assert row.program == program
        assert row.lowered_s > 0
