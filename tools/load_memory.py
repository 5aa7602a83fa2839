"""How much host memory loading takes: a sharded 2 GB random checkpoint on one and on four virtual devices.

Each load runs in a process of its own. Fails when the peak passes the checkpoint's size plus 500 MB, or
when more numbers are read from the checkpoint than it holds (a tensor gathered whole twice).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MB = 1_000_000
ALLOWANCE_MB = 500
NUM_SHARDS = 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 9,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


def make_checkpoint(folder: Path) -> int:
    """Writes the checkpoint shard by shard and returns its size in bytes."""
    from safetensors.numpy import save_file

    from hex_llm.models.families import model_spec
    from hex_llm.models.params import abstract_weights, declared

    params = declared(abstract_weights(model_spec(CONFIG)))
    shapes = {piece.name: piece.shape for param in params for piece in param.pieces}
    names = list(shapes)
    numbers = np.random.default_rng(0)
    weight_map = {}
    for i in range(NUM_SHARDS):
        shard = f"model-{i + 1:05d}-of-{NUM_SHARDS:05d}.safetensors"
        mine = names[i::NUM_SHARDS]
        save_file({n: numbers.standard_normal(shapes[n], dtype=np.float32) for n in mine}, folder / shard)
        weight_map |= dict.fromkeys(mine, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class Counted:
    """A checkpoint tensor that counts the numbers read from it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.shape, self.num_read = tensor, tensor.shape, 0

    def read(self, index: tuple[slice, ...], integers: Any = None) -> np.ndarray[Any, Any]:
        values = self.tensor.read(index, integers)
        self.num_read += values.size
        return values


def load(folder: Path, num_devices: int) -> dict[str, Any]:
    import jax

    from hex_llm.execution.load import load_weights
    from hex_llm.execution.weight_plan import plan_weights
    from hex_llm.models.families import model_spec
    from hex_llm.parallel.shardings import make_mesh
    from hex_llm.weights.model_files import open_model

    files = open_model(folder)
    assert files.checkpoint is not None
    checkpoint = {name: Counted(tensor) for name, tensor in files.checkpoint.items()}
    spec = model_spec(files.config).split_over(num_devices)
    start = time.perf_counter()
    weights = load_weights(plan_weights(spec), checkpoint, make_mesh(num_devices), np.dtype(np.float32))
    jax.block_until_ready(weights)
    most = max(tensor.num_read / np.prod(tensor.shape) for tensor in checkpoint.values())
    return {
        "devices": num_devices,
        "seconds": round(time.perf_counter() - start, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MB),
        "reads_of_a_number": float(most),
    }


def load_apart(folder: Path, num_devices: int) -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, str(folder), str(num_devices)]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


def main() -> int:
    if len(sys.argv) == 3:
        print(json.dumps(load(Path(sys.argv[1]), int(sys.argv[2]))))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size_mb = make_checkpoint(folder) / MB
        allowed_mb = size_mb + ALLOWANCE_MB
        print(f"checkpoint: {size_mb:.0f} MB in {NUM_SHARDS} shards; allowed peak: {allowed_mb:.0f} MB")
        results = [load_apart(folder, num_devices) for num_devices in (1, 4)]
    for result in results:
        print(result)
    good = [r["peak_mb"] < allowed_mb and r["reads_of_a_number"] <= 1 for r in results]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
