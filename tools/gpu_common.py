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
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_8B,
    "llama-70b": {
        **LLAMA_8B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "qwen3-8b": QWEN3,
    "qwen3-30b-a3b": {
        **QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "experts_per_token": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "swiglu_limit": 7.0,
        "initial_context_length": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "torch_dtype": "bfloat16",
        "eos_token_id": 200002,
        "pad_token_id": 199999,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": True,
    },
}
RANK = 16  # of the adapters
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
    "prompts128": Workload(128, 1800, 1),
    "sampled64": Workload(64, 1000, 200, 1.0),
}
FIRST = Workload(8, 100, 16)  # the requests that end a start


def flags_for(tiny: bool) -> dict[str, Any]:
    return {**FLAGS, **(TINY_FLAGS if tiny else {})}


def write_model(folder: Path, tiny: bool, quantized: str | None = None, shape: str = "llama-8b") -> None:
    """A folder that is served with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY if tiny else SHAPES[shape]
    extra = {"quantization_config": QUANTIZED[quantized]} if quantized else {}
    (folder / "config.json").write_text(json.dumps({**config, **extra}))


def write_adapters(folder: Path, num: int, tiny: bool) -> list[str]:
    """Folders of adapters for every linear module of the Llama's layers, all different."""
    import numpy as np
    from safetensors.numpy import save_file

    config = TINY if tiny else LLAMA_8B
    width, ffn = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    sizes = {f"self_attn.{name}_proj": (width, width) for name in "qo"}
    sizes |= {f"self_attn.{name}_proj": (kv, width) for name in "kv"}
    sizes |= {f"mlp.{name}_proj": (ffn, width) for name in ("gate", "up")} | {"mlp.down_proj": (width, ffn)}
    names = [name.partition(".")[2] for name in sizes]
    numbers = (np.random.default_rng(0).standard_normal(ffn * RANK) * 0.01).astype(np.float16)
    folders = []
    for i in range(num):
        own, tensors = np.roll(numbers, i), {}
        for layer in range(config["num_hidden_layers"]):
            for name, (outputs, inputs) in sizes.items():
                path = f"base_model.model.model.layers.{layer}.{name}.lora"
                tensors[f"{path}_A.weight"] = own[: RANK * inputs].reshape(RANK, inputs)
                tensors[f"{path}_B.weight"] = own[: outputs * RANK].reshape(outputs, RANK)
        one = folder / f"adapter{i}"
        one.mkdir(parents=True)
        save_file(tensors, one / "adapter_model.safetensors")
        told = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": names, "bias": "none"}
        (one / "adapter_config.json").write_text(json.dumps({**told, "task_type": "CAUSAL_LM"}))
        folders.append(str(one))
    return folders


def tell(name: str, value: Any) -> None:
    """One result, to the process that has started this one, if it wants to know."""
    if RESULTS in os.environ:
        with Path(os.environ[RESULTS]).open("a") as file:
            file.write(json.dumps([name, value]) + "\n")


def tell_started() -> None:
    tell("answered_at", time.time())


def await_turn(path: Path | None) -> None:
    """Several processes may start at once and be measured by turns: this one has started, which PATH.started
    says, and goes on when PATH is there."""
    if path is None:
        return
    path.with_suffix(".started").touch()
    while not path.exists():
        time.sleep(0.2)


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
