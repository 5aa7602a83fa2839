"""Single steps of an engine, made up and timed, and where their time goes: no scheduler, no requests."""

from __future__ import annotations

import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from hex_llm import LLM, SamplingParams
from hex_llm.types import Chunk, StepPlan

CONTEXT = 1500  # tokens before a decode whose parts are timed
REPEATS = 10
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
    """Decodes of some batches, and a full prefill."""
    config = llm.config
    batches = sorted({min(n, config.max_decode_seqs) for n in (1, 64, 128, 256)})
    together = min(config.max_prefill_seqs, config.max_step_tokens(llm.engine.spec.max_len) // 1000)
    decodes = {f"decode {n}": decode_plan(llm, n, CONTEXT) for n in batches}
    return decodes | {f"prefill {together} x 1000": prefill_plan(llm, together, 1000)}


def compile_all(llm: LLM, steps: list[StepPlan]) -> None:
    """Several at a time, before they are run one by one."""
    runner = llm.engine.stepper.runner
    with ThreadPoolExecutor(8) as compilers:
        list(compilers.map(runner._program, {runner.paddings.shape(plan) for plan in steps}))


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
        wall = timed_step(llm, name, plan)
        with jax.profiler.trace(str(folder / name)):
            repeated(llm, plan)
        tell_parts(kernels(folder / name), wall)
    runner, full = llm.engine.stepper.runner, list(steps.values())[-2]
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"logprobs": 5}):
        record = runner.layout.record(SamplingParams(**params), 1, 1, [1], None)
        runner.write_slots([(1 + i, record) for i in range(len(full.decodes))])
        timed_step(llm, f"{len(full.decodes)} rows, {params}", full)


def write_programs(llm: LLM, folder: Path) -> None:
    for name, plan in plans(llm).items():
        shape = llm.engine.stepper.runner.paddings.shape(plan)
        (folder / f"{name.replace(' ', '_')}.txt").write_text(
            llm.engine.stepper.runner._program(shape).as_text()
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
