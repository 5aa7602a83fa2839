"""Output tokens per second of the shape of Llama-3.1-8B, bfloat16 and random weights, on one GPU.

Run by `python -m tools.bench_gpu` from the root. Many requests at once, offline, greedy, none ends early: how
long the start took, one line for each workload, and with --profile where the time of single steps goes.
--vllm-python=PATH, an interpreter that has vLLM, makes a comparison instead: ours from a start with nothing
compiled before, ours once more for its start alone, and vLLM's, one after another in processes of their own.
--tiny runs all of it on a small model, so that it can be tried without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from hex_llm import LLM, SamplingParams
from hex_llm.ipc.stats import Stats
from hex_llm.types import Update
from tools.gpu_common import (
    FIRST,
    QUANTIZED,
    RANK,
    SHAPES,
    WORKLOADS,
    Workload,
    await_turn,
    flags_for,
    run_part,
    tell_rate,
    tell_started,
    write_adapters,
    write_model,
)
from tools.gpu_steps import profile, write_programs

PARTS = ("cold", "warm", "vllm", "vllm-warm")


class Timed:
    """An engine's steps, with what each has noted of the host's time."""

    def __init__(self, llm: LLM) -> None:
        self.notes: list[Stats] = []
        self._engine, self._step = llm.engine, llm.engine.step
        llm.engine.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Update]:
        updates = self._step()
        self.notes.append(self._engine.stats)
        return updates


def start(folder: Path, cache: Path, options: argparse.Namespace, flags: dict[str, Any]) -> LLM:
    warm_up = not options.no_warmup
    write_model(folder, options.tiny, options.quantized, options.shape)
    began = time.perf_counter()
    jax.devices()
    devices = time.perf_counter()
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **{"download_dir": str(cache), **flags})
    jax.block_until_ready((llm.engine.stepper.runner.weights, llm.engine.stepper.runner.pages))
    loaded = time.perf_counter()
    if warm_up:
        llm.engine.warm_up()
    compiled = time.perf_counter()
    num_programs = len(llm.engine.stepper.runner.all_programs()) if warm_up else 0
    generate(llm, "first", FIRST, [])
    tell_started()
    first = time.perf_counter()
    print(
        f"start: devices {devices - began:.1f} s, weights {loaded - devices:.1f} s, "
        f"{num_programs} programs {compiled - loaded:.1f} s, first requests {first - compiled:.2f} s",
        flush=True,
    )
    return llm


def generate(llm: LLM, name: str, workload: Workload, adapters: list[str]) -> tuple[int, float]:
    """Tokens that came out, and seconds; requests have the adapters by turns."""
    prompts = workload.prompts(name)
    params = SamplingParams(temperature=workload.temperature, max_tokens=workload.num_out, ignore_eos=True)
    own = [adapters[i % len(adapters)] for i in range(len(prompts))] if adapters else None
    began = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, lora_request=own, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def bench(llm: LLM, timed: Timed, name: str, workload: Workload, adapters: list[str]) -> None:
    timed.notes.clear()
    produced, seconds = generate(llm, name, workload, adapters)
    tell_rate(name, workload, produced, seconds)
    steps = len(timed.notes)
    parts = {
        part: sum(getattr(note, part + "_s") for note in timed.notes)
        for part in ("schedule", "dispatch", "wait")
    }
    parts |= {"other": seconds - sum(parts.values()), "all": seconds}
    told = ", ".join(f"{part} {total * 1000 / steps:.2f}" for part, total in parts.items())
    late = llm.engine.stepper.runner.num_late_compiles
    print(f"    {steps} steps, the host's ms in each: {told}; {late} compiled late", flush=True)


def ours(options: argparse.Namespace, folder: Path) -> None:
    flags = flags_for(options.tiny)
    flags |= {name: json.loads(value) for name, value in (flag.split("=", 1) for flag in options.flag)}
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {flags}", flush=True)
    cache = options.cache or folder / "cache"
    adapters = write_adapters(folder, options.adapters, options.tiny)
    if adapters:
        flags |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK}
    llm = start(folder / "model", cache, options, flags)
    if adapters:  # onto the device, before anything is timed
        generate(llm, "adapters", FIRST._replace(num_requests=len(adapters)), adapters)
    timed = Timed(llm)
    await_turn(options.wait)
    if options.profile:
        profile(llm, folder)
        if options.hlo:
            write_programs(llm, options.hlo)
    for name in workload_names(options):
        bench(llm, timed, name, WORKLOADS[name].scaled(options.tiny), adapters)
        if adapters:
            bench(llm, timed, f"{name} without adapters", WORKLOADS[name].scaled(options.tiny), [])
    print(llm.engine.stepper.runner.temporary_bytes() >> 20, "MiB of temporaries")


def workload_names(options: argparse.Namespace) -> list[str]:
    return [] if options.names == ["none"] else options.names or list(WORKLOADS)


def compare(options: argparse.Namespace, folder: Path) -> None:
    names = workload_names(options)
    tiny = ["--tiny"] if options.tiny else []
    cache = options.cache or folder / "cache"
    flags = [f"--flag={flag}" for flag in options.flag]
    both = [*tiny, *([f"--quantized={options.quantized}"] if options.quantized else [])]
    both += [f"--adapters={options.adapters}", f"--shape={options.shape}"]
    mine = [sys.executable, "-m", "tools.bench_gpu", f"--cache={cache}", *both, *flags]
    theirs = [options.vllm_python, "-m", "tools.bench_gpu_vllm", *both]
    kept = {
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    commands = {
        "cold": lambda: run_part([*mine, *(names or ["none"])]),
        "warm": lambda: run_part([*mine, "none"]),
        "vllm": lambda: run_part([*theirs, *(names or ["none"])], kept),
        "vllm-warm": lambda: run_part([*theirs, "none"], kept),
    }
    found = {part: commands[part]() for part in options.parts.split(",")}
    print(as_table(found, names, options.tiny))


def as_table(found: dict[str, dict[str, Any]], names: list[str], tiny: bool) -> str:
    cold, warm, vllm, vllm_warm = (found.get(part, {}) for part in PARTS)
    rows = [
        (f"{name}: {WORKLOADS[name].scaled(tiny)}", cold.get(name), vllm.get(name), ",.0f") for name in names
    ]
    lines = [
        "| workload (tokens in / out) | hex_llm, output tok/s | vLLM, output tok/s | ratio |",
        "|---|---|---|---|",
        *(_row(*row) for row in rows),
        "",
        "| from a process's start to its first answers | hex_llm, s | vLLM, s | ratio |",
        "|---|---|---|---|",
        _row("nothing compiled before", cold.get("start_s"), vllm.get("start_s"), ".1f"),
        _row("once more", warm.get("start_s"), vllm_warm.get("start_s"), ".1f"),
    ]
    return "\n".join(lines)


def _row(label: str, mine: float | None, theirs: float | None, form: str) -> str:
    ratio = f"{mine / theirs:.2f}" if mine and theirs else "–"
    shown = ["–" if value is None else format(value, form) for value in (mine, theirs)]
    return f"| {label} | {' | '.join(shown)} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of workloads: {', '.join(WORKLOADS)}, or none")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM: compare with it")
    parser.add_argument("--parts", default="cold,warm,vllm", help=f"of the comparison: {','.join(PARTS)}")
    parser.add_argument("--cache", type=Path, help="a folder that keeps what was compiled; else none does")
    parser.add_argument("--profile", action="store_true", help="also time the parts of single steps")
    parser.add_argument("--hlo", type=Path, help="a folder for the compiled programs of those steps")
    parser.add_argument("--no-warmup", action="store_true", help="compile only what is used")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens")
    parser.add_argument("--quantized", choices=QUANTIZED, help="instead of bfloat16")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="of the model")
    parser.add_argument("--adapters", type=int, default=0, help="that requests have by turns")
    parser.add_argument("--wait", type=Path, help="for this file before anything is measured")
    parser.add_argument("--flag", action="append", default=[], help="name=value, as JSON, of the engine")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (compare if options.vllm_python else ours)(options, Path(folder))


if __name__ == "__main__":
    main()
