"""Single steps of an engine, made up and timed, and where their time goes: no scheduler, no requests."""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax

from hex_llm import LLM, SamplingParams
from hex_llm.types import Chunk, StepPlan

CONTEXT = 1500  # tokens before a decode whose parts are timed
REPEATS = 10
MIXED = [(70, 0, 442), (300, 0, 724), (20, 0, 2028), (20, 2000, 1004), (20, 0, 4076)]
# Of a kernel's name, the first that matches.
KINDS = {
    "attention": r"attend|write_kernel",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitk|dot",
    "copies": r"memcpy|memset|copy",
    "other": r"",
}


def decode_plan(llm: LLM, num_rows: int, context: int) -> StepPlan:
    """One token for each row, after `context` others."""
    return StepPlan(tuple(_chunk(llm, i, context, 1) for i in range(num_rows)))


def prefill_plan(llm: LLM, num_rows: int, num_tokens: int) -> StepPlan:
    return StepPlan((), tuple(_chunk(llm, i, 0, num_tokens) for i in range(num_rows)))


def _chunk(llm: LLM, row: int, position: int, num_tokens: int) -> Chunk:
    """Of the row's own blocks, as far as there are so many."""
    each = -(-(position + num_tokens) // llm.config.block_size)
    num_usable = llm.engine.stepper.scheduler.pool.num_usable
    blocks = [1 + (row * each + j) % num_usable for j in range(each)]
    return Chunk(1 + row, position, num_tokens, blocks, 0, True)


def plans(llm: LLM) -> dict[str, StepPlan]:
    """Decodes of some batches, decodes with a chunk of a prompt, and a full prefill."""
    limits = llm.engine.stepper.scheduler.limits
    batches = sorted({min(n, limits.max_decode_seqs) for n in (1, 64, 128, 256)})
    together = min(limits.max_prefill_seqs, limits.max_tokens // 1000)
    decodes = {f"decode {n}": decode_plan(llm, n, CONTEXT) for n in batches}
    mixed = {}
    for n, cached, num_tokens in MIXED:
        if n < limits.max_decode_seqs:
            chunk = _chunk(llm, n, cached, num_tokens)
            name = f"decode {n} and prefill {num_tokens} after {cached}"
            mixed[name] = StepPlan(decode_plan(llm, n, 600).decodes, (chunk,))
    return mixed | {f"prefill {together} x 1000": prefill_plan(llm, together, 1000)} | decodes


def remember(llm: LLM, plan: StepPlan, **params: Any) -> None:
    """Writes the slots of a plan's rows; where there are adapters, they have them by turns. Tokens are
    random: rows that are alike would choose the same experts."""
    runner = llm.engine.stepper.runner
    record, rng = partial(runner.layout.record, SamplingParams(**params), 1, 1), random.Random(0)
    num = runner.adapter_layout.num_slots if runner.adapter_layout else 0
    tokens = [rng.randrange(llm.engine.spec.vocab_size) for _ in range(2 * llm.config.max_model_len)]
    runner.write_slots(
        [
            (
                chunk.slot,
                record(tokens[i : i + chunk.end], list(chunk.blocks), None, 1 + i % num if num else 0),
            )
            for i, chunk in enumerate(plan.chunks)
        ]
    )


def repeated(llm: LLM, plan: StepPlan, repeats: int = REPEATS) -> tuple[float, float]:
    """Seconds until some steps were sent off, and until they had ended."""
    began = time.perf_counter()
    steps = [llm.engine.stepper.runner.dispatch(plan) for _ in range(repeats)]
    sent = time.perf_counter()
    llm.engine.stepper.runner.read(steps[-1])
    return sent - began, time.perf_counter() - began


def timed_step(llm: LLM, name: str, plan: StepPlan) -> float:
    """Milliseconds."""
    repeated(llm, plan)
    sent, all = (seconds * 1000 / REPEATS for seconds in repeated(llm, plan))
    print(f"{name}: {all:.2f} ms, of which the host is busy sending it off {sent:.2f} ms", flush=True)
    return all


def profile(llm: LLM, folder: Path) -> None:
    """Ends with the ways to choose tokens, in full batches."""
    steps = plans(llm)
    for name, plan in steps.items():
        remember(llm, plan, temperature=0.0)
        wall = timed_step(llm, name, plan)
        with jax.profiler.trace(str(folder / name)):
            repeated(llm, plan)
        tell_parts(kernels(folder / name), wall)
    full = list(steps.values())[-1]
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"logprobs": 5}):
        remember(llm, full, **params)
        timed_step(llm, f"{len(full.decodes)} rows, {params}", full)


def write_programs(llm: LLM, folder: Path) -> None:
    for name, plan in plans(llm).items():
        shape = llm.engine.stepper.runner.paddings.shape(plan)
        (folder / f"{name.replace(' ', '_')}.txt").write_text(
            llm.engine.stepper.runner.program(shape).as_text()
        )


def kernels(folder: Path) -> Counter[str]:
    """Milliseconds in a step of each kernel; numbers at the end of names are dropped."""
    [file] = folder.rglob("*.xplane.pb")
    found: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                found[re.sub(r"(_\d+)+$", "", event.name)] += event.duration_ns / 1e6 / REPEATS
    return found


def tell_parts(found: Counter[str], wall: float) -> None:
    parts = dict.fromkeys(KINDS, 0.0)
    for name, ms in found.items():
        parts[next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.I))] += ms
    parts["idle"] = wall - sum(parts.values())
    print("    " + ", ".join(f"{kind} {ms:.2f}" for kind, ms in parts.items()))
    for name, ms in found.most_common(14):
        print(f"    {ms:8.3f} {name[:100]}", flush=True)
