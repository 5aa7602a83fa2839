"""Models and GPUs that tools/gpu_compile.py and tools/gpu_kernels.py try them on: public shapes as data, and
their steps as programs of which weights and pages are only described.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.config import EngineConfig
from hex_llm.execution import programs
from hex_llm.execution.adapters import AdapterLayout
from hex_llm.execution.batch import StepShape, num_choices
from hex_llm.execution.kernel_choice import DTYPES, Devices, choose_kernels, page_shapes
from hex_llm.execution.slots import SlotLayout
from hex_llm.execution.weight_layouts import in_words
from hex_llm.execution.weight_plan import FORMS, plan_weights
from hex_llm.kernels import gpu_launch
from hex_llm.models.families import model_spec
from hex_llm.models.linear import Dense
from hex_llm.models.params import Param, Weights
from hex_llm.models.quantized import Quantized, quantize
from hex_llm.parallel.shardings import make_mesh
from hex_llm.weights.grouped import Form
from tools.gpu_common import SHAPES
from tools.tpu_models import AWQ, GEMMA_2_9B, GEMMA_3_27B, MIXTRAL_8X7B

QUANTIZED = {"awq": AWQ, "mxfp4": Form(4, group=32, is_float=True), **FORMS}
BLOCK, MAX_LEN, MOST, NUM_BLOCKS = 32, 8192, 512, 1001
ADAPTERS = (16, 16)  # slots, and ranks of each
STEPS = [StepShape(n, n, 0) for n in (1, 8, 40, 64, 128, 256, 512)]
STEPS += [StepShape(64, 16, 2), StepShape(512, 64, 4), StepShape(2048, 64, 4), StepShape(8192, 64, 8)]


class Gpu(NamedTuple):
    """By the datasheets."""

    capability: float
    processors: int
    shared: int  # bytes of a multiprocessor
    threads: int  # of a multiprocessor
    memory: float
    bandwidth: float
    cache: int
    clock: float  # GHz

    @property
    def most_shared(self) -> int:
        """That a program can have."""
        return self.shared - (1024 if self.capability >= gpu_launch.MIN_CAPABILITY else 0)

    def described(self, name: str) -> str:
        """As XLA's compiler wants it."""
        major, minor = str(self.capability).split(".")
        numbers = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": self.threads,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "shared_memory_per_block": 49152,
            "shared_memory_per_block_optin": self.most_shared,
            "shared_memory_per_core": self.shared,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
            "core_count": self.processors,
            "fpus_per_core": 128,
            "clock_rate_ghz": self.clock,
            "memory_bandwidth": int(self.bandwidth),
            "device_memory_size": int(self.memory),
            "l2_cache_size": self.cache,
        }
        fields = " ".join(f"{field}: {number}" for field, number in numbers.items())
        fields += f" cuda_compute_capability {{ major: {major} minor: {minor} }}"
        # Or products in 8 bits are expanded.
        fields += ' runtime_version: "12.8.0" driver_version: "13.0.0" compile_time_toolkit_version: "12.8.0"'
        others = f'dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"'
        return f'gpu_device_info {{ {fields} }} platform_name: "CUDA" {others}'


MIB = 2**20
GPUS = {
    "T4": Gpu(7.5, 40, 65_536, 1024, 15.6e9, 320e9, 4 * MIB, 1.59),
    "A100": Gpu(8.0, 108, 167_936, 2048, 42.4e9, 1.56e12, 40 * MIB, 1.41),
    "A10": Gpu(8.6, 72, 102_400, 1536, 24e9, 600e9, 6 * MIB, 1.7),
    "L4": Gpu(8.9, 58, 102_400, 1536, 23.6e9, 300e9, 48 * MIB, 2.04),
    "H100": Gpu(9.0, 132, 233_472, 2048, 85e9, 3.35e12, 50 * MIB, 1.98),
    "H200": Gpu(9.0, 132, 233_472, 2048, 151e9, 4.8e12, 50 * MIB, 1.98),
    "B200": Gpu(10.0, 148, 233_472, 2048, 190e9, 8e12, 126 * MIB, 1.96),
    "RTX-5090": Gpu(12.0, 170, 102_400, 1536, 34e9, 1.79e12, 96 * MIB, 2.4),
}


class Model(NamedTuple):
    config: dict[str, Any]
    quantized: str | None = None
    kv_dtype: str = "auto"
    adapted: bool = False
    dtype: str = "bfloat16"


def _known() -> dict[str, Model]:
    llama, gpt_oss = SHAPES["llama-8b"], SHAPES["gpt-oss-20b"]
    few_heads = llama | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    many_kv_heads = llama | {"num_key_value_heads": 32, "hidden_size": 3072}  # of 96
    return {
        "llama-8b": Model(llama),
        **{f"llama-8b in {form}": Model(llama, form) for form in ("awq", "int8", "fp8")},
        "llama-8b, pages of int8": Model(llama, kv_dtype="int8"),
        "llama-8b, adapters": Model(llama, adapted=True),
        "llama-8b in float16": Model(llama, dtype="float16"),
        "llama-8b in float16, pages of fp8": Model(llama, kv_dtype="fp8", dtype="float16"),
        "llama-8b in float32": Model(llama, dtype="float32"),
        "heads of 64": Model(few_heads),
        "heads of 96": Model(many_kv_heads),
        "gemma-2-9b": Model(GEMMA_2_9B),
        "gemma-2-9b, pages of int8": Model(GEMMA_2_9B, kv_dtype="int8"),
        "gemma-2-9b in float32": Model(GEMMA_2_9B, dtype="float32"),
        "gemma-3-27b": Model(GEMMA_3_27B),
        "qwen3-8b": Model(SHAPES["qwen3-8b"]),
        "qwen3-30b-a3b": Model(SHAPES["qwen3-30b-a3b"]),
        "qwen3-30b-a3b in awq": Model(SHAPES["qwen3-30b-a3b"], "awq"),
        "mixtral-8x7b": Model(MIXTRAL_8X7B),
        "mixtral-8x7b in awq": Model(MIXTRAL_8X7B, "awq"),
        "mixtral-8x7b in awq, float16": Model(MIXTRAL_8X7B, "awq", dtype="float16"),
        "gpt-oss-20b": Model(gpt_oss),
        "gpt-oss-20b in mxfp4": Model(gpt_oss, "mxfp4"),
    }


MODELS = _known()


def can_have(model: Model, gpu: Gpu) -> bool:
    """It has floats of 8 bits, if pages need them."""
    return model.kv_dtype != "fp8" or gpu.capability >= GPUS["L4"].capability


def step_of(model: Model, shape: StepShape) -> tuple[Any, ...]:
    """A step's function and its arguments, of the last two layers, which have all kinds that the model has.
    Within gpu_launch.made_for."""
    jax.clear_caches()  # of what was traced for another
    spec = model_spec(model.config, max_model_len=MAX_LEN)
    spec = replace(spec, layers=spec.layers[-2:])
    dtype = np.dtype(DTYPES[model.dtype])
    config = EngineConfig(kv_cache_dtype=model.kv_dtype, block_size=BLOCK)
    devices = Devices.of(config, "gpu", 1, dtype)
    kernels = choose_kernels(spec, devices)
    form = QUANTIZED[model.quantized] if model.quantized else None
    weights = _loaded(plan_weights(spec, None, 1, kernels.can_multiply, form).weights, dtype)
    if devices.platform == "gpu":
        weights = jax.eval_shape(partial(kernels.lay_out, hold=_in_words), weights)
    layout = SlotLayout(MOST + 1, MAX_LEN, spec.vocab_size, MAX_LEN // BLOCK)
    shapes = page_shapes(spec, devices, NUM_BLOCKS)
    pages = [jax.eval_shape(partial(kernels.empty_pages, one, devices.kv_dtype)) for one in shapes]
    slots = jax.ShapeDtypeStruct((layout.num_slots, layout.width), jnp.int32)
    mesh = make_mesh(1, jax.devices("cpu")[:1])
    adapters = AdapterLayout(spec, mesh, devices.dtype, *ADAPTERS, kernels.adapter_kernels.slots_first)
    setting = programs.ProgramContext(
        spec,
        mesh,
        layout,
        num_choices(MOST),
        kernels.attention,
        kernels.experts,
        adapters,
        kernels.adapter_kernels,
    )
    held = _described(adapters.params(ADAPTERS[0]), devices.dtype) if model.adapted else {}
    key = shape._replace(adapted=model.adapted)
    described = programs.described(key, setting, weights, pages, slots, held)
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), described.arguments)
    return described.function, *arguments


def _loaded(weights: Weights, dtype: np.dtype[Any]) -> Any:
    def one(part: Any) -> Any:
        described = _described(part, dtype)
        if isinstance(part, Dense) and (to := part.array.rounded_to) is not None:
            return jax.eval_shape(partial(quantize, to=to), described)
        return described

    return jax.tree.map(one, weights, is_leaf=lambda node: isinstance(node, Dense | Quantized | Param))


def _in_words(part: Any) -> Any:
    return in_words(part) if isinstance(part, Quantized) else part


def _described(tree: Any, dtype: np.dtype[Any]) -> Any:
    def one(param: Param) -> jax.ShapeDtypeStruct:
        last = param.shape[-1] // (2 if param.packed else 1)
        return jax.ShapeDtypeStruct((*param.shape[:-1], last), param.dtype or dtype)

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, Param))
