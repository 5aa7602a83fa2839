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
from hex_llm.execution.adapters import AdapterLayout
from hex_llm.execution.batch import Paddings
from hex_llm.execution.flops import Work
from hex_llm.execution.kernel_choice import Devices
from hex_llm.execution.load import weight_bytes
from hex_llm.execution.memory import token_bytes
from hex_llm.execution.slots import SlotLayout
from hex_llm.kernels import cpu
from hex_llm.models.families import model_spec
from hex_llm.models.params import F32, abstract_weights, declared
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import abstract_mesh
from hex_llm.scheduling.limits import StepLimits
from hex_llm.weights.model_files import ModelFiles, is_gguf, open_model
from hex_llm.weights.quantization import Quantization, quantization_of
from hex_llm.weights.source import fetch_headers

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
HIDDEN_ARRAYS = 4  # hidden states of all tokens at a time, in a step
CHOICE_ARRAYS = 5  # as large as the logits, while tokens are chosen


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
    paddings: Paddings
    slots: SlotLayout
    weights: int  # with the slots of adapters
    per_token: int  # keys and values
    temporaries: int  # the slots and, by an estimate, what the largest program needs besides
    is_expanded: bool  # its quantized weights are held as floats

    @property
    def has_float8(self) -> bool:
        params = declared(self.plan.weights.weights)
        rounded = [one.rounded_to for one in params if one.rounded_to is not None]
        return any(one.dtype == FLOAT8 for one in params) or any(
            to.to_float and to.bits == 8 for to in rounded
        )

    def kv_tokens(self, room: float) -> int:
        """That so many bytes hold; not more than the engine would make room for."""
        size = self.paddings.config.block_size
        most = self.paddings.limits.max_decode_seqs * self.paddings.table_width
        return max(min(int(room) // (self.per_token * size), most), 0) * size

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


def footprint(model: Model, platform: str, num_devices: int, usable: float, context: int) -> Footprint:
    """As devices with so many usable bytes hold it. ConfigError: they cannot, whatever their size."""
    config, mesh = model.config, abstract_mesh(num_devices)
    dtype = resolve_dtype(config.dtype, platform)
    choice = Devices.of(config, platform, num_devices, dtype)
    plan = plan_model(config, model.files, model.spec, choice)
    # The kernels' own forms hold scales in float16; on CPUs, where that loses nothing.
    in_panels = platform == "cpu" and num_devices == 1 and cpu.quantized_panel_width()
    is_narrowed = platform == "gpu" or (in_panels and plan.checkpoint is not None)
    params, held = declared(plan.weights.weights), plan.held
    weights = weight_bytes(params, mesh, dtype, 16 if is_narrowed else 32)
    if config.enable_lora:
        layout = AdapterLayout(held, mesh, dtype, config.max_loras, config.max_lora_rank)  # type: ignore[arg-type]
        adapters: Any = layout.params(config.max_loras)
        weights += weight_bytes(declared(adapters), mesh, dtype)
    limits = StepLimits.of(config, context, platform, max(int(usable - weights), 0))
    paddings = Paddings(config, limits, context, plan.kernels.max_single)
    slots = SlotLayout(limits.max_decode_seqs + 1, context, held.vocab_size, paddings.table_width)
    is_kept = any(one.packed or one.rounded_to or (one.dtype or F32) != F32 for one in params)
    return Footprint(
        plan,
        num_devices,
        paddings,
        slots,
        weights,
        per_token=token_bytes(held, choice),
        temporaries=4 * slots.num_slots * slots.width + working_bytes(held, paddings, num_devices, dtype),
        is_expanded=model.bits < 16 and not is_kept,
    )


def working_bytes(held: ModelSpec, paddings: Paddings, num_devices: int, dtype: np.dtype[Any]) -> int:
    """Of the largest program, about as the TPU compiler counts it. A step: for each token hidden states,
    whole on every device, and a device's part of what lies between two matrices, for experts once for each
    that a token has chosen. Or the choice of tokens: arrays like the logits."""
    widths = []
    for layer in held.layers:
        routed = layer.experts
        copies, size = (routed.num_per_token, routed.size) if routed else (0, layer.ffn_size)
        between = 2 * size // num_devices * max(copies, 1)
        widths.append((HIDDEN_ARRAYS + 3 * copies) * held.hidden_size + between)
    step = paddings.limits.step_sizes[-1] * dtype.itemsize * max(widths)
    return max(step, CHOICE_ARRAYS * paddings.max_choices * 4 * held.vocab_size // num_devices)
