"""What a model takes on devices that need not be there: the engine's own plan, with nothing loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np

from hex_llm.config import EngineConfig
from hex_llm.engine.loading import ModelPlan, open_checkpoint, plan_model, resolve_dtype
from hex_llm.errors import ModelError
from hex_llm.execution.flops import Work
from hex_llm.execution.kernel_choice import Devices
from hex_llm.execution.load import weight_bytes
from hex_llm.execution.memory import token_bytes
from hex_llm.kernels import cpu
from hex_llm.models.families import model_spec
from hex_llm.models.params import F32, abstract_weights, declared
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import abstract_mesh
from hex_llm.scheduling.limits import DEFAULTS, LARGE_GPU, LARGE_MEMORY
from hex_llm.weights.model_files import ModelFiles, is_gguf, open_model
from hex_llm.weights.quantization import Quantization, quantization_of
from hex_llm.weights.source import fetch_headers

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
CHOICE_ARRAYS = 3  # as large as the logits, while tokens are chosen


@dataclass(frozen=True)
class Model:
    """A model of which headers are known, or its config alone."""

    config: EngineConfig
    files: ModelFiles
    spec: ModelSpec
    quantization: Quantization | None

    @cached_property
    def num_params(self) -> int:
        params = declared(abstract_weights(self.spec))
        return sum(int(np.prod(param.shape, dtype=np.int64)) for param in params)

    @property
    def bits(self) -> int:
        """Of a weight: as --quantization asks, or as it is stored."""
        asked = {"int8": 8, "fp8": 8, "int4": 4}.get(self.config.quantization or "")
        stored = 16 if self.quantization is None else self.quantization.schemes[0].bits
        if is_gguf(self.files.path):
            stored = round(self.files.path.stat().st_size * 8 / self.num_params)
        return asked or (16 if self.config.quantization == "none" else stored)

    @property
    def named_billions(self) -> float:
        """As such models are called: 8 of 8.03, 405 of 405.9, 1.2 of 1.24."""
        billions = self.num_params / 1e9
        return float(int(billions)) if billions >= 2 else float(f"{billions:.2g}")


@contextmanager
def opened_model(config: EngineConfig) -> Iterator[Model]:
    """Inside, its headers can be read; those of the hub's models are fetched, and no weights."""
    with TemporaryDirectory() as folder:
        path, config_only = fetch_headers(config, Path(folder))
        files = open_model(path, config_only=config_only)
        spec = model_spec(
            files.config, max_model_len=config.max_model_len, sliding_window=config.sliding_window
        )
        if path.is_relative_to(folder) and files.checkpoint is not None:
            # What the holes would hold is not there: inputs are taken to be in order, as they mostly are.
            kept = {name: one for name, one in files.checkpoint.items() if not name.endswith("g_idx")}
            files = replace(files, checkpoint=kept)
            try:
                open_checkpoint(config, files, spec)
            except ModelError:
                files = replace(files, checkpoint=None)
        yield Model(config, files, spec, quantization_of(files.config))


@dataclass(frozen=True)
class Footprint:
    """Of each device, in bytes."""

    plan: ModelPlan
    num_devices: int
    weights: int
    per_token: int  # keys and values
    temporaries: int  # an estimate: what the largest step needs besides
    is_expanded: bool  # its quantized weights are held as floats

    @property
    def has_float8(self) -> bool:
        params = declared(self.plan.weights.weights)
        return any(one.dtype == FLOAT8 or (one.rounded_to and one.rounded_to.to_float) for one in params)

    @property
    def work(self) -> Work:
        return Work.of(self.plan.held)

    def read_in_step(self, num_rows: int) -> float:
        """Bytes of weights that a step of so many tokens reads: of a table, rows; of experts, those that some
        token has chosen, as many as chance would make it."""
        weights, held = self.plan.weights.weights, self.plan.held
        total = self._bytes((weights.layers, weights.lm_head))
        for layer, w in zip(held.layers, weights.layers, strict=True):
            if layer.experts is not None:
                idle = (1 - layer.experts.num_per_token / layer.experts.num) ** num_rows
                total -= idle * self._bytes((w.ffn.gate_up, w.ffn.down))
        return total

    def _bytes(self, tree: Any) -> float:
        """Of some of the weights."""
        some, everything = declared(tree), declared(self.plan.weights.weights)
        mesh = abstract_mesh(self.num_devices)
        dtype = np.dtype(np.float16)
        return self.weights * weight_bytes(some, mesh, dtype) / weight_bytes(everything, mesh, dtype)


def footprint(model: Model, platform: str, num_devices: int, usable: float) -> Footprint:
    """As devices with so many usable bytes hold it. ConfigError: they cannot, whatever their size."""
    config = model.config
    dtype = resolve_dtype(config.dtype, platform)
    choice = Devices.of(config, platform, num_devices, dtype)
    plan = plan_model(config, model.files, model.spec, choice)
    # The kernels' own forms hold scales in float16; on CPUs, where that loses nothing.
    in_panels = platform == "cpu" and cpu.quantized_panel_width() and plan.checkpoint is not None
    is_narrowed = num_devices == 1 and (platform == "gpu" or in_panels)
    params = declared(plan.weights.weights)
    weights = weight_bytes(params, abstract_mesh(num_devices), dtype, 16 if is_narrowed else 32)
    is_large = platform == "gpu" and usable - weights >= LARGE_MEMORY
    limits = LARGE_GPU if is_large else DEFAULTS[platform]
    max_tokens = config.max_num_batched_tokens or limits.max_tokens
    rows = config.max_decode_seqs or limits.max_decode_seqs
    held, size = plan.held, dtype.itemsize
    ffn = max(
        (one.experts.size * one.experts.num_per_token if one.experts else one.ffn_size) for one in held.layers
    )
    hidden = max_tokens * size * (3 * held.hidden_size + 3 * ffn // num_devices)
    chosen = CHOICE_ARRAYS * rows * 4 * held.vocab_size // num_devices
    is_kept = any(one.packed or one.rounded_to or (one.dtype or F32) != F32 for one in params)
    is_expanded = model.bits < 16 and not is_kept
    per_token = token_bytes(held, choice)
    return Footprint(plan, num_devices, weights, per_token, max(hidden, chosen), is_expanded)
