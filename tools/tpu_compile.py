"""Compiles the steps of known models for TPU slices, without a TPU, and says what each chip would hold.

    python -m tools.tpu_compile [--models llama-3.1-8b,...] [--layers 2] [--out table.md]

Weights and pages are only described. Besides the steps there are, as `parts`, kernels alone in the shapes of
other models. Where the `libtpu` package is installed (x86-64 Linux), the real compiler runs, for the programs
that execution/runner.py compiles, each in its own process; elsewhere they are lowered for TPUs, which proves
tracing and the kernel's lowering, and nothing about memory or speed. It needs jax, numpy, msgspec and tqdm.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs; the compiler comes with the topology

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh

from hex_llm.execution import programs
from hex_llm.execution.adapters import AdapterLayout
from hex_llm.execution.batch import StepShape
from hex_llm.execution.kernel_choice import KV_DTYPES
from hex_llm.execution.programs import ProgramSpec
from hex_llm.execution.weight_plan import FORMS, plan_weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import abstract_mesh, group_meshes
from hex_llm.planning.compile import (
    DTYPE,
    Sizes,
    compiler_problem,
    context_of,
    described_params,
    described_weights,
    held,
    step_shapes,
    topology_devices,
    topology_mesh,
    tpu_kernels,
)
from hex_llm.weights.grouped import Form
from tools import tpu_hlo
from tools.tpu_models import AWQ, MODELS, Chip, Model
from tools.tpu_parts import parts

ADAPTERS = (16, 16)  # slots, and ranks of each
DUMP_BUNDLES = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles --xla_jf_dump_to"
QUANTIZED = {"awq": AWQ, "int8": FORMS["int8"], "mxfp4": Form(4, group=32, is_float=True)}
LARGE = 1 << 20  # elements of a parameter whose copies matter


@dataclass(frozen=True)
class Program:
    """What is handed to the compiler, described; `num_layers` is 0 for what is no step of a model."""

    described: ProgramSpec
    num_layers: int = 0

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.described.arguments

    def traced(self, layouts: str) -> Any:
        """`layouts` auto: the compiler chooses those of the first argument, a step's weights."""
        function, arguments, donated, out_shardings = self.described
        given: dict[str, Any] = {}
        if layouts == "auto" and self.num_layers:
            chosen = jax.tree.map(lambda x: Format(Layout.AUTO, x.sharding), arguments[0])
            given["in_shardings"] = (chosen, *(jax.tree.map(lambda x: x.sharding, arguments[1:])))
        return jax.jit(function, donate_argnums=donated, out_shardings=out_shardings, **given).trace(
            *arguments
        )


def described(setting: programs.ProgramContext, weights: Any, sizes: Sizes) -> dict[str, Program]:
    """The step that decodes, without and with adapters, the one that prefills two prompts, the logits, the
    choice of tokens, and what moves a prompt's blocks from those who prefill to those who decode."""
    spec, mesh = setting.spec, setting.mesh
    keys: dict[str, programs.Key] = {
        **step_shapes(sizes),
        "adapted": StepShape(sizes.batch, sizes.batch, 0, adapted=True),
        "logits": programs.Logits(sizes.batch),
        "choice": programs.Choose(sizes.batch),
        "take": programs.TakeBlocks(sizes.context // sizes.block_size),
        "put": programs.PutBlocks(sizes.context // sizes.block_size),
    }
    layout_of_adapters = AdapterLayout(spec, mesh, np.dtype(DTYPE), *ADAPTERS)
    slots_of_adapters = described_params(layout_of_adapters.params(ADAPTERS[0]), mesh)
    return {
        name: Program(
            programs.described(
                key, setting, weights, *held(setting, sizes), slots_of_adapters if name == "adapted" else {}
            ),
            len(spec.layers) if isinstance(key, StepShape) else 0,
        )
        for name, key in keys.items()
    }


# ---- what came of it


def local_elements(described: jax.ShapeDtypeStruct) -> int:
    assert described.sharding is not None
    return math.prod(described.sharding.shard_shape(described.shape))


def local_bytes(tree: Any) -> int:
    """Two numbers of 4 bits share a byte, although the type does not say so."""
    halves = (
        local_elements(x) * x.dtype.itemsize * (1 if x.dtype == jnp.int4 else 2)
        for x in jax.tree.leaves(tree)
    )
    return sum(halves) // 2


def multiplied(tree: Any) -> int:
    """The weights among these, without scales."""
    return sum(local_elements(x) for x in jax.tree.leaves(tree) if x.dtype != jnp.float32)


class Row(NamedTuple):
    """A line of the table."""

    model: str
    program: str
    weights: float = 0.0  # bytes of a chip, like those that follow
    pages: float = 0.0
    hbm: float = 0.0
    floor_s: float = 0.0
    lowered_s: float = 0.0
    compiled_s: float | None = None
    temporaries: float | None = None
    total: float | None = None
    estimated_s: float | None = None
    scheduled_s: float | None = None
    exchanges: str = ""
    copies: str = ""
    fault: str = ""  # why the rest is not known


class Job:
    """One program: traced, lowered and, where there is a compiler, compiled. When it has run, `row` is
    complete or has a fault."""

    def __init__(
        self, label: str, program: Program, row: Row, chip: Chip, options: argparse.Namespace
    ) -> None:
        self.label, self.program, self.row, self.chip, self.options = label, program, row, chip, options

    def run(self, can_compile: bool) -> None:
        started = time.monotonic()
        try:
            traced = self.program.traced(self.options.layouts)
            lowered = traced.lower() if can_compile else traced.lower(lowering_platforms=("tpu",))
            self.row = self.row._replace(lowered_s=time.monotonic() - started)
            if can_compile:
                self._measure(lowered)
            else:
                calls = lowered.as_text().count("@tpu_custom_call")
                self.row = self.row._replace(exchanges=f"not known; {calls} calls of the kernel are written")
        except Exception as e:
            self.row = self.row._replace(fault=f"{type(e).__name__}: {str(e)[:600]}")
            traceback.print_exc()

    def _measure(self, lowered: Any) -> None:
        start = time.monotonic()
        compiled = lowered.compile()
        self.row = self.row._replace(compiled_s=time.monotonic() - start)
        memory, hlo = compiled.memory_analysis(), compiled.as_text()
        if dump := self.options.dump:
            dump.mkdir(parents=True, exist_ok=True)
            with gzip.open(dump / f"{re.sub(r'[^a-z0-9.]+', '-', self.label)}.hlo.gz", "wt") as file:
                file.write(hlo)
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        layers = self.program.num_layers
        counted = [
            f"{n} {name}" + (f" ({n / layers:.2f} a layer)" if layers else "")
            for name, n in sorted(tpu_hlo.collectives(hlo).items())
        ]
        if gathered := tpu_hlo.largest_gathered(hlo):
            counted.append(f"largest gathered {gathered} elements")
        parameters = {
            local_elements(x)
            for x in jax.tree.leaves(self.program.arguments)
            if x.sharding and local_elements(x) >= LARGE
        }
        self.row = self.row._replace(
            temporaries=memory.temp_size_in_bytes + results,
            total=memory.argument_size_in_bytes + memory.temp_size_in_bytes + results,
            estimated_s=tpu_hlo.estimated_cycles(hlo) / self.chip.clock,
            scheduled_s=self._scheduled_s(hlo),
            exchanges=", ".join(counted) or "none",
            copies=", ".join(
                f"{n} {what}" for what, n in tpu_hlo.materialised(hlo, parameters).most_common(4)
            )
            or "none",
        )

    def _scheduled_s(self, hlo: str) -> float | None:
        if self.options.bundles is None:
            return None
        clock, dumped = self.chip.clock, tpu_hlo.dumped_bundles(self.options.bundles)
        a_cycle = self.chip.bandwidth / clock, self.chip.flops / clock
        return tpu_hlo.scheduled_cycles(hlo, dumped, *a_cycle) / clock


def floors(spec: ModelSpec, weights: Any, pages: Any, sizes: Sizes, chip: Chip) -> dict[str, float]:
    """The least time of a chip: a decode reads its weights, its sequences' keys and values, and the head, as
    logits do; a prefill multiplies each token with the weights that it needs (of experts, those chosen)."""
    read, head = local_bytes(weights.layers), local_bytes(weights.lm_head)
    of_one = local_bytes(pages) / (pages[0].shape[0] * sizes.block_size) * sizes.context
    kept = of_one * sizes.batch
    used = 0.0
    for layer, w in zip(spec.layers, weights.layers, strict=True):
        experts = layer.experts
        chosen = 1.0 if experts is None else experts.num_per_token / experts.num
        used += multiplied(w) - (1 - chosen) * multiplied((w.ffn.gate_up, w.ffn.down))
    return {
        "decode": (read + kept + head) / chip.bandwidth,
        "adapted": (read + kept + head) / chip.bandwidth,  # the adapters' own not counted
        "prefill": sizes.prefill * used * 2 / chip.flops,  # 2 operations for each weight
        "logits": head / chip.bandwidth,
        "choice": 0.0,
        **dict.fromkeys(("take", "put"), 2 * of_one / chip.bandwidth),
    }


HEAD = (
    "| model | program | weights GB | pages GB | temporaries GB | all / HBM GB | estimated ms | "
    "scheduled ms | floor ms | exchanges | parameters written anew | lowered s | compiled s |\n"
    + "|---" * 13
    + "|"
)


def line(r: Row) -> str:
    if r.fault:
        return f"| {r.model} | {r.program} |" + " |" * 7 + f" {one_line(r.fault)} | | | |"

    def shown(value: float | None, unit: float, digits: int = 2) -> str:
        return "not known" if value is None else f"{value / unit:.{digits}f}"

    cells = [
        r.model,
        r.program,
        shown(r.weights, 1e9),
        shown(r.pages, 1e9),
        shown(r.temporaries, 1e9),
        f"{shown(r.total, 1e9)} / {r.hbm / 1e9:.1f}",
        shown(r.estimated_s, 1e-3),
        shown(r.scheduled_s, 1e-3),
        shown(r.floor_s, 1e-3) if r.floor_s else "",
        r.exchanges,
        r.copies,
        shown(r.lowered_s, 1, 1),
        shown(r.compiled_s, 1, 1),
    ]
    return "| " + " | ".join(cells) + " |"


def one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]


# ---- where it runs


def mesh_of(model: Model, group: int = 0, can_compile: bool = False) -> Mesh | AbstractMesh:
    """Of those that its slice is divided into, as engine/loading.py divides it."""
    if not can_compile:
        return abstract_mesh(model.num_chips, model.chip.kind)
    if model.disagg_topo is None:
        return topology_mesh(model.slice)
    return group_meshes(model.num_chips, sum(model.disagg_topo), topology_devices(model.slice))[group]


def labels(options: argparse.Namespace) -> list[str]:
    """Of the programs that are asked for: model/program, of a group model/program@group, and parts/name."""
    kinds, model = options.programs.split(","), next(iter(MODELS.values()))
    found = [
        f"{name}/{program}"
        for kind in kinds
        if kind != "parts"
        for name in options.models.split(",")
        for program in MODELS[name].programs(kind)
    ]
    known = parts(mesh_of(model), model.chip.kind) if "parts" in kinds else ()
    return found + [f"parts/{name}" for name in known]


def job_of(label: str, sizes: Sizes, options: argparse.Namespace, can_compile: bool) -> Job:
    name, kind = label.split("/", 1)
    model = MODELS[name] if name in MODELS else next(iter(MODELS.values()))  # whose slice parts are on
    shape, _, group = kind.partition("@")
    mesh = mesh_of(model, int(group or 0), can_compile)
    if name == "parts":
        program, row = Program(parts(mesh, model.chip.kind)[kind]), Row(kind, "part", hbm=model.chip.hbm)
        return Job(label, program, row, model.chip, options)
    if model.context is not None:
        sizes = sizes._replace(context=model.context, tokens=sizes.batch * model.context)
    spec = model.spec(sizes.max_len, options.layers)
    keeps = tpu_kernels(spec, mesh.size, sizes).can_multiply
    rounded_to = QUANTIZED[options.quantized] if options.quantized else model.rounded_to
    planned = plan_weights(spec, None, mesh.size, keeps, rounded_to).weights
    weights = described_weights(planned, mesh, model.chip.kind)
    found = described(context_of(spec, mesh, model.chip.kind, sizes), weights, sizes)
    pages = found["decode"].arguments[1]
    floor = floors(spec, weights, pages, sizes, model.chip)[shape]
    shown = f"{name} ×{mesh.size} {model.slice}" + (f", {options.quantized}" if options.quantized else "")
    shown += f", {len(spec.layers)} layers" if options.layers else ""
    shown += f", pages of {sizes.kv_dtype}" * (sizes.kv_dtype != DTYPE)
    row = Row(shown, kind, local_bytes(weights), local_bytes(pages), model.chip.hbm, floor)
    return Job(label, found[shape], row, model.chip, options)


def run_here(label: str, sizes: Sizes, options: argparse.Namespace, can_compile: bool) -> Row:
    try:
        job = job_of(label, sizes, options, can_compile)
    except Exception as e:
        traceback.print_exc()
        return Row(*label.split("/", 1), fault=f"{type(e).__name__}: {e}")
    job.run(can_compile)
    return job.row


def run_apart(label: str, options: argparse.Namespace) -> Row:
    """In a process of its own, since a compiler may abort it, or not come to an end."""
    named = {
        name: value for name, value in vars(options).items() if name not in ("out", "models", "programs")
    }
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value is not None]
    with tempfile.NamedTemporaryFile("r") as result:
        command = [
            sys.executable,
            "-m",
            "tools.tpu_compile",
            f"--one={label}",
            f"--out={result.name}",
            *flags,
        ]
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=options.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return Row(*label.split("/", 1), fault=f"no result after {options.limit:.0f} s")
        if told := result.read():
            return Row(*json.loads(told))
    fatal = re.findall(r"^F\d{4} .*\] (.*)$", ended.stderr, re.MULTILINE) or ended.stderr.splitlines()[-1:]
    return Row(*label.split("/", 1), fault=f"ended with code {ended.returncode}: {' '.join(fatal)}")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas between them")
    parser.add_argument(
        "--programs", default="decode,adapted,prefill,logits,choice,take,put,parts", help="which of these"
    )
    parser.add_argument("--layers", type=int, help="only so many of each model, for a quick try")
    parser.add_argument("--batch", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--context", type=int, default=1536, help="tokens of each, for the floor")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens prefilled at once")
    parser.add_argument("--tokens", type=int, default=64 * 1536, help="tokens that there are KV pages for")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--layouts", choices=("default", "auto"), default="default", help="of weights")
    parser.add_argument("--quantized", choices=QUANTIZED, help="as if checkpoints were")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="bfloat16", help="of pages")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds for one program")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--one", help="only this program, whose row goes to --out as JSON")
    parser.add_argument("--dump", type=Path, help="write the compiled programs to this folder")
    return parser.parse_args(given)


def main() -> int:
    options = arguments()
    sizes = Sizes(
        options.batch,
        options.context,
        options.prefill,
        options.tokens,
        options.block_size,
        options.max_len,
        np.dtype(KV_DTYPES[options.kv_cache_dtype]),
    )
    problem = compiler_problem()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            options.bundles = None if problem else Path(folder)
            os.environ["LIBTPU_INIT_ARGS"] = (
                f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {DUMP_BUNDLES}={folder}"
            )
            row = run_here(options.one, sizes, options, can_compile=not problem)
        options.out.write_text(json.dumps(row))
        return 0
    how = f"jax {jax.__version__}, " + (
        f"lowered for TPUs only, not compiled ({problem})" if problem else "compiled by libtpu"
    )
    title = (
        f"{how}. Decode of {sizes.batch} sequences of {sizes.context} tokens, prefill of {sizes.prefill} "
        f"tokens, pages for {sizes.tokens} tokens in blocks of {sizes.block_size}, of {sizes.kv_dtype}, else "
        f"bfloat16, layouts of weights: {options.layouts}. Bytes are those of one chip. The estimate is the "
        "compiler's own guess, what is scheduled is counted in bundles; neither has exchanges, copies that "
        "run beside others, and attention's kernel. The floor has the context's keys and values in it."
    )
    print(title, HEAD, sep="\n\n", flush=True)
    run = partial(run_here, sizes=sizes, options=options, can_compile=False)
    rows: list[Row] = []
    with ThreadPoolExecutor(1 if problem else options.processes) as pool:
        running = [
            pool.submit(run if problem else partial(run_apart, options=options), one)
            for one in labels(options)
        ]
        for one in as_completed(running):
            rows.append(one.result())
            print(line(rows[-1]), flush=True)
            if options.out:
                options.out.write_text("\n".join([title, "", HEAD, *map(line, sorted(rows)), ""]))
    return int(any(row.fault for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
