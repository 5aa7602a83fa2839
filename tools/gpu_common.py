"""What the measurements on one GPU share: the model's shape, the workloads, and how a process tells results.

Plain data and the standard library, for vLLM's side reads it too: knows neither jax nor hex_llm.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
START_S, STOP_S = 400, 30  # of a server, at most
RESULTS = "BENCH_GPU_RESULTS"  # the environment variable that names a file for them

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
QUANTIZED: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY = {**LLAMA_8B, **SMALL, "num_key_value_heads": 2}
TINY_SCALE = 20  # requests and output tokens are so many times fewer

FLAGS = {
    "max_model_len": 4096,
    "max_decode_seqs": 256,
    "max_prefill_seqs": 8,
    "max_num_batched_tokens": 8192,
}
TINY_FLAGS = {"max_model_len": 2048, "max_decode_seqs": 8, "max_num_batched_tokens": 2048, "num_blocks": 4096}


class Workload(NamedTuple):
    """Requests that come all at once, none of which ends early."""

    num_requests: int
    num_in: int  # tokens of each
    num_out: int
    temperature: float = 0.0

    def scaled(self, tiny: bool) -> Workload:
        if not tiny:
            return self
        requests, out = max(self.num_requests // TINY_SCALE, 1), max(self.num_out // TINY_SCALE, 1)
        return self._replace(num_requests=requests, num_out=out)

    def prompts(self, name: str) -> list[list[int]]:
        """The same ones for the same name, on every side."""
        rng = random.Random(name)
        return [[rng.randrange(1000, 120000) for _ in range(self.num_in)] for _ in range(self.num_requests)]

    def __str__(self) -> str:
        sampled = f", temperature {self.temperature:g}" if self.temperature else ""
        return f"{self.num_requests} at once, {self.num_in} / {self.num_out}{sampled}"


WORKLOADS = {
    "b1": Workload(1, 128, 256),
    "c64": Workload(64, 1000, 1000),
    "c128": Workload(128, 1000, 1000),
    "c256": Workload(256, 1000, 1000),
    "prefill128": Workload(128, 1800, 128),
    "sampled64": Workload(64, 1000, 200, 1.0),
}
FIRST = Workload(8, 100, 16)  # the requests that end a start


def flags_for(tiny: bool) -> dict[str, Any]:
    return {**FLAGS, **(TINY_FLAGS if tiny else {})}


def write_model(folder: Path, tiny: bool, quantized: str | None = None) -> None:
    """A folder that is served with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY if tiny else LLAMA_8B
    extra = {"quantization_config": QUANTIZED[quantized]} if quantized else {}
    (folder / "config.json").write_text(json.dumps({**config, **extra}))


def tell(name: str, value: Any) -> None:
    """One result, to the process that has started this one, if it wants to know."""
    if RESULTS in os.environ:
        with Path(os.environ[RESULTS]).open("a") as file:
            file.write(json.dumps([name, value]) + "\n")


def tell_started() -> None:
    tell("answered_at", time.time())


def tell_rate(name: str, workload: Workload, num_tokens: int, seconds: float) -> None:
    total = num_tokens + workload.num_requests * workload.num_in
    rates = f"{num_tokens / seconds:.0f} output tok/s, {total / seconds:.0f} total tok/s"
    print(f"{name}: {seconds:.2f} s, {rates}", flush=True)
    tell(name, num_tokens / seconds)


def run_part(command: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a process of its own tells; `start_s` is from its beginning to its first answers.

    One that fails loses what it had not told yet, and nothing else.
    """
    print(f"$ {' '.join(command)}", flush=True)
    with tempfile.NamedTemporaryFile("r") as results:
        began = time.time()
        told = {**os.environ, **(environ or {}), RESULTS: results.name}
        process = subprocess.run(command, cwd=ROOT, env=told, check=False)
        known: dict[str, Any] = dict(map(json.loads, results))
    if process.returncode:
        print(f"ended with code {process.returncode}", flush=True)
    if "answered_at" in known:
        known["start_s"] = known.pop("answered_at") - began
    return known


@contextmanager
def started(
    command: Sequence[str], log: Path, ready: Callable[[], Any], environ: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """A server in a process of its own, stopped at the end: what `ready` gives, once that is something. It
    writes to `log`, which is shown if it cannot start."""
    print(f"$ {' '.join(command)}", flush=True)
    began = time.perf_counter()
    with log.open("w") as file:
        told = {**os.environ, **(environ or {})}
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=told)
    try:
        while not (found := ready()):
            time.sleep(0.1)
            if process.poll() is not None or time.perf_counter() - began > START_S:
                raise SystemExit(f"the server failed:\n{log.read_text()[-6000:]}")
        print(f"the server is ready after {time.perf_counter() - began:.1f} s", flush=True)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
