"""Output tokens per second of the shape of Llama-3.1-8B, bfloat16 and random weights, on one GPU.

The workloads and their prompts are those of the comparison with vLLM: many requests at once, offline, greedy,
none ends early. Prints how long the start took, one line for each workload, and with --profile where the time
of single steps goes. --tiny runs all of it on a small model, so that it can be tried without a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from hex_llm import LLM, SamplingParams
from hex_llm.engine.stats import Stats
from hex_llm.types import Chunk, StepPlan, Update

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {**LLAMA_8B, **SMALL, "num_key_value_heads": 2}
FLAGS = {
    "max_model_len": 4096,
    "max_decode_seqs": 256,
    "max_prefill_seqs": 8,
    "max_num_batched_tokens": 8192,
}
TINY_FLAGS = {"max_model_len": 2048, "max_decode_seqs": 8, "max_num_batched_tokens": 2048, "num_blocks": 4096}
WORKLOADS = {  # name: requests, input tokens, output tokens, temperature
    "b1": (1, 128, 256, 0.0),
    "c64": (64, 1000, 1000, 0.0),
    "c128": (128, 1000, 1000, 0.0),
    "c256": (256, 1000, 1000, 0.0),
    "prefill128": (128, 1800, 128, 0.0),
    "sampled64": (64, 1000, 200, 1.0),
}
WARM = (8, 100, 16, 0.0)
CONTEXT = 1500  # tokens before a decode whose parts are timed
REPEATS = 10
# Of a kernel's name, the first that matches.
KINDS = {
    "attention": r"attend|write_kernel",
    "matmul": r"gemm|nvjet|cutlass|xmma|cublas|gemv|splitk|dot",
    "copies": r"memcpy|memset|copy",
    "other": r"",
}


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


def start(folder: str, tiny: bool, warm_up: bool, flags: dict[str, Any]) -> LLM:
    Path(folder, "config.json").write_text(json.dumps(TINY if tiny else LLAMA_8B))
    began = time.perf_counter()
    jax.devices()
    devices = time.perf_counter()
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, **{"download_dir": folder, **flags})
    jax.block_until_ready((llm.engine.runner.weights, llm.engine.runner.pages))
    loaded = time.perf_counter()
    if warm_up:
        llm.engine.warm_up()
    compiled = time.perf_counter()
    num_programs = len(llm.engine.runner.all_programs()) if warm_up else 0
    generate(llm, "warm", *WARM)
    first = time.perf_counter()
    print(
        f"start: devices {devices - began:.1f} s, weights {loaded - devices:.1f} s, "
        f"{num_programs} programs {compiled - loaded:.1f} s, first requests {first - compiled:.2f} s",
        flush=True,
    )
    return llm


def generate(
    llm: LLM, name: str, requests: int, num_in: int, num_out: int, temperature: float
) -> tuple[int, float]:
    """Tokens that came out, and seconds."""
    rng = random.Random(name)
    prompts = [[rng.randrange(1000, 120000) for _ in range(num_in)] for _ in range(requests)]
    params = SamplingParams(temperature=temperature, max_tokens=num_out, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def bench(llm: LLM, timed: Timed, name: str, scale: int) -> None:
    requests, num_in, num_out, temperature = WORKLOADS[name]
    requests, num_out = max(requests // scale, 1), num_out // scale
    timed.notes.clear()
    produced, seconds = generate(llm, name, requests, num_in, num_out, temperature)
    print(
        f"{name}: {seconds:.2f} s, {produced / seconds:.0f} output tok/s, "
        f"{(produced + requests * num_in) / seconds:.0f} total tok/s"
    )
    steps = len(timed.notes)
    parts = {
        part: sum(getattr(note, part + "_s") for note in timed.notes)
        for part in ("schedule", "dispatch", "wait")
    }
    parts |= {"other": seconds - sum(parts.values()), "all": seconds}
    told = ", ".join(f"{part} {total * 1000 / steps:.2f}" for part, total in parts.items())
    late = llm.engine.runner.num_late_compiles
    print(f"    {steps} steps, the host's ms in each: {told}; {late} compiled late", flush=True)


def plans(llm: LLM) -> dict[str, StepPlan]:
    """Steps to be timed: decodes of some batches, and a full prefill."""
    config, pool = llm.config, llm.engine.scheduler.pool
    each = -(-(CONTEXT + 1) // config.block_size)

    def chunk(i: int, position: int, num_tokens: int) -> Chunk:
        blocks = [1 + (i * each + j) % pool.num_usable for j in range(each)]
        return Chunk(1 + i, position, num_tokens, blocks, 0, True)

    batches = sorted({min(n, config.max_decode_seqs) for n in (1, 64, 128, 256)})
    found = {f"decode {n}": StepPlan(tuple(chunk(i, CONTEXT, 1) for i in range(n))) for n in batches}
    together = min(config.max_prefill_seqs, config.max_step_tokens(llm.engine.spec.max_len) // 1000)
    found[f"prefill {together} x 1000"] = StepPlan((), tuple(chunk(i, 0, 1000) for i in range(together)))
    return found


def profile(llm: LLM, folder: Path) -> None:
    """Ends with the ways to choose tokens, in full batches."""
    steps = plans(llm)
    for name, plan in steps.items():
        wall = timed_step(llm, name, plan)
        with jax.profiler.trace(str(folder / name)):
            repeated(llm, plan)
        tell_parts(kernels(folder / name), wall)
    runner, full = llm.engine.runner, list(steps.values())[-2]
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"logprobs": 5}):
        record = runner.layout.record(SamplingParams(**params), 1, 1, [1], None)
        runner.write_slots([(1 + i, record) for i in range(len(full.decodes))])
        timed_step(llm, f"{len(full.decodes)} rows, {params}", full)


def write_programs(llm: LLM, folder: Path) -> None:
    for name, plan in plans(llm).items():
        shape = llm.engine.runner.paddings.shape(plan)
        (folder / f"{name.replace(' ', '_')}.txt").write_text(llm.engine.runner._program(shape).as_text())


def timed_step(llm: LLM, name: str, plan: StepPlan) -> float:
    """Milliseconds."""
    repeated(llm, plan)
    sent, all = (seconds * 1000 / REPEATS for seconds in repeated(llm, plan))
    print(f"{name}: {all:.2f} ms, of which the host is busy sending it off {sent:.2f} ms", flush=True)
    return all


def repeated(llm: LLM, plan: StepPlan) -> tuple[float, float]:
    """Seconds until some steps were sent off, and until they had ended."""
    began = time.perf_counter()
    steps = [llm.engine.runner.dispatch(plan) for _ in range(REPEATS)]
    sent = time.perf_counter()
    llm.engine.runner.read(steps[-1])
    return sent - began, time.perf_counter() - began


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of workloads: {', '.join(WORKLOADS)}; all by default")
    parser.add_argument("--profile", action="store_true", help="also time the parts of single steps")
    parser.add_argument("--hlo", type=Path, help="a folder for the compiled programs of those steps")
    parser.add_argument("--no-warmup", action="store_true", help="compile only what is used")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens")
    parser.add_argument("--flag", action="append", default=[], help="name=value, as JSON, of the engine")
    options = parser.parse_args()
    flags = {**FLAGS, **(TINY_FLAGS if options.tiny else {})}
    flags |= {name: json.loads(value) for name, value in (flag.split("=", 1) for flag in options.flag)}
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {flags}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        llm = start(folder, options.tiny, not options.no_warmup, flags)
        timed = Timed(llm)
        if options.profile:
            profile(llm, Path(folder))
            if options.hlo:
                write_programs(llm, options.hlo)
        for name in [] if options.names == ["none"] else options.names or WORKLOADS:
            bench(llm, timed, name, 20 if options.tiny else 1)
        print(llm.engine.runner.temporary_bytes() >> 20, "MiB of temporaries")


if __name__ == "__main__":
    main()
