"""Runs steps: owns the weights, the KV pages, the slots, and the compiled programs.

Everything that runs on the devices is compiled ahead of time for a closed set of shapes. A step that is sent
off (`dispatch`) runs while the host goes on; `read` waits for it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from hex_llm.errors import HexError
from hex_llm.execution import programs
from hex_llm.execution.adapters import AdapterLayout, HostAdapter
from hex_llm.execution.batch import Ints, Paddings, StepShape, num_choices, parts_of
from hex_llm.execution.executable_cache import ExecutableCache
from hex_llm.execution.kernel_choice import Devices, choose_kernels, page_shapes
from hex_llm.execution.profile import Recorder
from hex_llm.execution.programs import (
    AddLogprobs,
    Adjust,
    Choose,
    Finish,
    Key,
    Logits,
    Pages,
    Program,
    PromptLogprobs,
    PutBlocks,
    TakeBlocks,
    Write,
    WriteAdapter,
)
from hex_llm.execution.results import TOKEN, likeliest, unpack_logprobs
from hex_llm.execution.sampling import VARIANTS, Features, variant_of
from hex_llm.execution.step_runner import Launched, StepRunner
from hex_llm.kernels import cpu
from hex_llm.models.adapters import Slots
from hex_llm.models.linear import Matrix
from hex_llm.models.params import Weights
from hex_llm.models.quantized import Float8
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import PAGES, placed
from hex_llm.sampling_params import MAX_LOGPROBS
from hex_llm.types import TokenLogprobs
from hex_llm.weights.source import private_folder

log = logging.getLogger(__name__)

KEPT_S = 0.05  # what takes longer to compile is kept
MEASURED_ON_CPU = 128  # tokens: longer steps take as much longer
PROMPT_ROWS = 64  # prompt tokens whose logits exist at a time
FINISHED_ROWS = (512, 64)  # tokens that are finished at a time, as many as there are
# Every stretch of a short step's kernels is a CUDA graph: of one row's step, 5 % of the time lay between
# kernels. Elsewhere there are none: the more graphs exist, the longer each takes (docs/kernels.md).
MAX_GRAPH_TOKENS = 512
GRAPHS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1}
# Kernels of a graph that need nothing of each other run at once: what adapters make of a product's inputs is
# made beside the product. Without adapters there is nothing to gain.
BESIDE: dict[str, Any] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
NO_GRAPHS: dict[str, Any] = {"xla_gpu_graph_min_graph_size": 1_000_000}
# cuBLAS's own choice of algorithms: as fast as what XLA finds by trying them, and sooner (docs/kernels.md).
# To try them it would also need room: a GiB for the head of a large vocabulary.
UNTRIED_PRODUCTS: dict[str, Any] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


class CompiledLate(HexError):
    """A program would have to be compiled after the warm-up, and --recompile=error forbids it."""


class Runner(StepRunner):
    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        mesh: Mesh,
        paddings: Paddings,
        num_blocks: int,
        dtype: np.dtype[Any],
        kept_in: Path | None = None,
        adapters: tuple[AdapterLayout, Slots] | None = None,
    ) -> None:
        """`weights` lie as the kernels want them. `kept_in` is a folder for compiled programs. Without
        `adapters` no request can have one."""
        config = paddings.config
        self._platform = str(mesh.devices.flat[0].platform)
        devices = Devices.of(config, self._platform, mesh.size, dtype)
        kernels = choose_kernels(spec, devices)
        self.weights = weights
        self._leaves = jax.tree.leaves(self.weights)
        super().__init__(spec, paddings, Recorder(config.profile), adapters is not None)
        self.mesh, self.dtype = mesh, dtype
        self.adapter_layout = None if adapters is None else adapters[0]
        self.adapters: Slots = {} if adapters is None else adapters[1]
        self.pages = allocate_pages(spec, mesh, num_blocks, devices)
        self._most = paddings.limits.max_decode_seqs
        self.slots = placed(self.layout.empty(), NamedSharding(mesh, P()))
        # Of each slot, as plain numbers: flags are slow to combine.
        self._features = [0] * self.layout.num_slots
        # Where branches cost little, one program chooses tokens, whatever is wanted.
        self.branches = self._platform != "gpu"
        self._has_float8 = any(map(_is_float8, jax.tree.leaves(weights, is_leaf=_is_float8)))
        self.is_warm = False
        # Accelerators round the factors of a float32 product to fewer bits unless told not to.
        self.precision = "highest" if dtype == np.float32 else "default"
        attention_kernels = programs.split_by_head(kernels.attention, mesh)
        expert_kernels = programs.split_by_width(kernels.experts, mesh)
        self.context = programs.ProgramContext(
            spec,
            mesh,
            self.layout,
            paddings.max_choices,
            attention_kernels,
            expert_kernels,
            self.adapter_layout,
            kernels.adapter_kernels,
        )
        self.compiled: dict[Key, Program] = {}
        # Python's lock lets one at a time do it anyway: so the first are soon compiling.
        self._lowering = threading.Lock()
        self._executables = None if kept_in is None else self._executable_cache(kept_in)

    @property
    def kv_dtype(self) -> str:
        return str(self.pages[0].dtype)

    def launch(self, shape: StepShape, packed: Ints, num_rows: int) -> Launched:
        slots = parts_of(packed, shape).slots[:num_rows].tolist()
        logits, rows, states = self._run(shape, packed)
        if not shape.gives_logits:
            num_rows = self.paddings.num_rows(num_rows)
            adapters = [self._adapters_of[slot] for slot in slots] if self.adapters else []
            lm_head = self._lm_head(num_rows, adapters)
            logits = self.program(Logits(num_rows))(lm_head, logits)
        features = Features(reduce(or_, (self._features[slot] for slot in slots)))
        return Launched(self._choose(logits, rows, features), states)

    def _run(self, shape: StepShape, packed: Ints) -> tuple[jax.Array, jax.Array, jax.Array]:
        given = (self._leaves, self.pages, self.slots, packed, *((self.adapters,) if shape.adapted else ()))
        last, rows, states, self.pages, self.slots = self.program(shape)(*given)
        return last, rows, states

    def _lm_head(self, num_rows: int, adapters: Sequence[int] = ()) -> Matrix:
        """For rows whose adapters are in these slots; the others have none."""
        if not self.adapters:
            return self.weights.lm_head
        which = _padded(np.array(adapters, np.int32), num_rows)
        return self.context.lm_head(self.weights, self.adapters, which)

    def _choose(self, logits: jax.Array, rows: jax.Array, features: Features) -> jax.Array:
        num_rows, adjusted = len(logits), logits
        if self.branches:
            choices, self.slots = self.program(Choose(num_rows))(self.slots, logits, rows)
            return choices
        if Features.ADJUSTED in features:
            adjusted = self.program(Adjust(num_rows))(self.slots, logits, rows)
        choose = self.program(Choose(num_rows, variant_of(features)))
        choices, self.slots = choose(self.slots, adjusted, rows)
        if Features.LOGPROBS in features:
            choices = self.program(AddLogprobs(num_rows))(logits, choices)
        return choices

    def finish(self, states: npt.NDArray[Any], adapters: Ints) -> npt.NDArray[Any]:
        pieces = [
            self.program(Finish(size))(
                self._leaves,
                _padded(states[start : start + size], size),
                *((self.adapters, _padded(adapters[start : start + size], size)) if self.adapters else ()),
            )
            for start, size in _pieces(len(states))
        ]
        return np.concatenate([np.asarray(piece) for piece in pieces])[: len(states)]

    def logprobs_of(
        self, hidden: npt.NDArray[Any], following: Ints, num_top: int, adapter: int = 0
    ) -> list[TokenLogprobs]:
        of_all = num_top > MAX_LOGPROBS
        program, told = self.program(PromptLogprobs(PROMPT_ROWS, of_all)), list[TokenLogprobs]()
        lm_head = self._lm_head(PROMPT_ROWS, [adapter] * PROMPT_ROWS)
        for i in range(0, len(following), PROMPT_ROWS):
            part = [_padded(x[i : i + PROMPT_ROWS], PROMPT_ROWS) for x in (hidden, following)]
            rows = np.asarray(program(lm_head, *part))[: len(following) - i]
            told += (
                likeliest(rows, part[1], num_top)
                if of_all
                else unpack_logprobs(rows.view(TOKEN)[:, 0], num_top)
            )
        return told

    def write_slots(self, records: Sequence[tuple[int, Ints]]) -> None:
        super().write_slots(records)
        for slot, record in records:
            self._features[slot] = int(self.layout.features(record))
        self._write("all", records)

    def write_allowed(self, words: Sequence[tuple[int, Ints]]) -> None:
        self._write("allowed", words)

    def stage(self, adapter: HostAdapter) -> Slots:
        assert self.adapter_layout is not None
        return self.adapter_layout.stage(adapter)

    def write_adapter(self, slot: int, adapter: HostAdapter, staged: Slots) -> None:
        self.adapters = self.program(WriteAdapter())(self.adapters, staged, np.int32(slot))

    def take_blocks(self, blocks: Sequence[int]) -> Pages:
        """What they hold, filled up to `move_size` of them: this returns before it is there, and the blocks
        may be reused at once."""
        taken: Pages = self.program(TakeBlocks(move_size(len(blocks))))(self.pages, _filled_up(blocks))
        return taken

    def pages_from(self, contents: Any) -> Pages:
        """What was taken elsewhere, on its way to these devices."""
        moved: Pages = jax.device_put(contents, NamedSharding(self.mesh, PAGES))
        return moved

    def put_blocks(self, blocks: Sequence[int], contents: Pages) -> None:
        """Before the next step, which waits for it."""
        program = self.program(PutBlocks(move_size(len(blocks))))
        self.pages = program(self.pages, _filled_up(blocks), contents)

    def warm_up(self, progress: bool = False, meet: Callable[[], object] = tuple) -> dict[int, float]:
        self.compile_all(progress)
        meet()
        self.run_all()
        return self.measure_steps() if self.config.enable_jit else {}  # op by op says nothing of the rest

    def compile_all(self, progress: bool = False) -> None:
        """Every program that can be needed."""
        keys = self.all_programs()
        with ThreadPoolExecutor(os.cpu_count()) as compilers:
            compiled = compilers.map(self.program, keys)
            list(tqdm(compiled, "Compiling", len(keys), disable=not progress))
        self.is_warm = True

    def measure_steps(self) -> dict[int, float]:
        """Seconds by number of tokens, of some shapes: padding alone, which sees next to no keys."""
        most, seconds = MEASURED_ON_CPU if self._platform == "cpu" else sys.maxsize, {}
        shapes = self.paddings.all_shapes()
        sizes = {1 << i for i in range(max(shape.num_tokens for shape in shapes).bit_length())}
        for shape in (shape for shape in shapes if shape.num_tokens in sizes and shape.num_tokens <= most):
            for _ in range(2):  # the first is slower
                started = time.perf_counter()
                jax.block_until_ready(self._run_padding(shape))
                seconds[shape.num_tokens] = time.perf_counter() - started
        told = ", ".join(f"{n} tokens {s * 1000:.1f} ms" for n, s in seconds.items())
        log.info("steps take: %s", told)
        return seconds

    def all_programs(self) -> list[Key]:
        """The large ones first, so that no thread is left with one at the end."""
        shapes = self._all_shapes()
        sizes = sorted({_write_size(n, self._most) for n in range(1, self._most + 1)})
        rows = sorted({num_choices(n) for n in self.paddings.all_num_rows})
        kinds: list[Callable[[int], Key]] = [Choose]
        if not self.branches:
            chosen = (partial(Choose, variant=variant) for variant in reversed(VARIANTS))
            kinds = [*chosen, AddLogprobs, Adjust]
        choices = [kind(n) for kind in kinds for n in reversed(rows)]
        writes = [Write("all", n) for n in sizes] + [Write("allowed", n) for n in sizes]
        return [
            *reversed(shapes),
            *choices,
            *reversed(self._logits_programs()),
            *(Finish(size) for size in FINISHED_ROWS if size <= max(shapes[-1].num_tokens, PROMPT_ROWS)),
            PromptLogprobs(PROMPT_ROWS),
            *(
                []
                if 0 <= self.config.max_logprobs <= MAX_LOGPROBS
                else [PromptLogprobs(PROMPT_ROWS, of_all=True)]
            ),
            *writes,
            *([WriteAdapter()] if self.adapters else []),
            *self._move_programs(),
        ]

    def _move_programs(self) -> list[Key]:
        if self.config.disagg_topo is None:
            return []
        most = self.paddings.table_width
        sizes = sorted({move_size(n) for n in range(1, most + 1)})
        return [kind(n) for kind in (TakeBlocks, PutBlocks) for n in sizes]

    def _all_shapes(self) -> list[StepShape]:
        shapes = self.paddings.all_shapes()
        return shapes + [shape._replace(adapted=True) for shape in shapes if self.adapters]

    def _logits_programs(self) -> list[Logits]:
        """For the largest step, if it does not give them."""
        if self.paddings.all_shapes()[-1].gives_logits:
            return []
        return [Logits(num_rows) for num_rows in self.paddings.all_num_rows]

    def temporary_bytes(self) -> int:
        """What the largest program that was compiled needs besides weights, pages and slots."""
        sizes = [p.memory_analysis() for p in self.compiled.values() if hasattr(p, "memory_analysis")]
        needed = (s.temp_size_in_bytes + s.output_size_in_bytes - s.alias_size_in_bytes for s in sizes if s)
        return max(needed, default=0)

    # ---- programs

    def program(self, key: Key) -> Program:
        """Compiled now, if it was not before. All that runs on the devices is asked for here."""
        if key in self.compiled:
            return self.compiled[key]
        if self.is_warm and self.config.enable_jit:
            self.num_late_compiles += 1
            if self.config.recompile == "error":
                raise CompiledLate(f"{key} was not compiled at the start, and --recompile=error")
            log.warning("compiling %s after the warm-up", key)
        self.is_compiling = True
        try:
            program = self._compile(key) if self.config.enable_jit else self._op_by_op(key)
        finally:
            self.is_compiling = False
        self.compiled[key] = program
        return program

    def _compile(self, key: Key) -> Any:
        function, arguments, donated, out_shardings = self._described(key)
        kept = self._executables and self._executables.load(repr(key), arguments, out_shardings)
        if kept is not None:
            return kept
        with jax.default_matmul_precision(self.precision):
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=out_shardings)
            with self._lowering:
                lowered = jitted.lower(*arguments)
            compiled = lowered.compile(compiler_options=self._options(key))
        if self._executables is not None:
            self._executables.save(repr(key), compiled)
        return compiled

    def _executable_cache(self, folder: Path) -> ExecutableCache:
        held = (self.weights, self.pages, self.slots, self.adapters)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype.name, str(x.sharding)), held)
        made_from = (self.spec, self.layout, self.config.block_size, self.precision, shapes)
        return ExecutableCache(folder, list(self.mesh.devices.flat), *made_from)

    def _options(self, key: Key) -> dict[str, Any] | None:
        if self._platform != "gpu":
            return None
        if not isinstance(key, StepShape) or key.num_tokens > MAX_GRAPH_TOKENS:
            return NO_GRAPHS | UNTRIED_PRODUCTS
        graphs = GRAPHS | BESIDE if key.adapted else GRAPHS
        # One row of floats of 8 bits is worth trying: what cuBLAS chooses itself is slower than 16 bits.
        return graphs if key.num_tokens == 1 and self._has_float8 else graphs | UNTRIED_PRODUCTS

    def _op_by_op(self, key: Key) -> Program:
        function = self._described(key).function

        def run(*arguments: Any) -> Any:
            with jax.disable_jit(), jax.default_matmul_precision(self.precision):
                return function(*jax.tree.map(jnp.asarray, arguments))

        return run

    def _described(self, key: Key) -> programs.ProgramSpec:
        return programs.described(key, self.context, self.weights, self.pages, self.slots, self.adapters)

    def _write(self, columns: Literal["all", "allowed"], rows: Sequence[tuple[int, Ints]]) -> None:
        if not rows:
            return
        num_rows = _write_size(len(rows), self._most)
        # What is left over repeats the first: a write of the same to the same place.
        padded = [*rows, *[rows[0]] * (num_rows - len(rows))]
        which = np.array([slot for slot, _ in padded], np.int32)
        self.slots = self.program(Write(columns, num_rows))(
            self.slots, which, np.stack([values for _, values in padded])
        )

    def run_all(self) -> None:
        """Loads every program onto accelerators and proves that its memory is there; padding alone runs."""
        if self._platform == "cpu":
            return
        combinations = [Features(0)] if self.branches else [*VARIANTS, Features.ADJUSTED | Features.LOGPROBS]
        chosen_for: set[int] = set()  # numbers of rows, which several fill up to

        def choose(logits: jax.Array) -> None:
            for features in () if len(logits) in chosen_for else combinations:
                self._choose(logits, rows, features)
            chosen_for.add(len(logits))

        for shape in self._all_shapes():
            last, rows = self._run_padding(shape)
            if shape.gives_logits:
                choose(last)
            jax.block_until_ready(self.slots)  # what waits for its turn would be in memory all at once
        for key in self._logits_programs():
            choose(self.program(key)(self._lm_head(key.num_rows), last))
        jax.block_until_ready(self.slots)

    def _run_padding(self, shape: StepShape) -> tuple[jax.Array, jax.Array]:
        last, rows, _ = self._run(shape, np.zeros(shape.packed_size, np.int32))
        return last, rows


def _is_float8(part: Any) -> bool:
    return isinstance(part, Float8)


def is_there(array: jax.Array) -> bool:
    """Whether it has been computed, and has arrived."""
    there: bool = array.is_ready()  # type: ignore[attr-defined]
    return there


def _padded(rows: Any, num_rows: int) -> Any:
    return np.pad(rows, [(0, num_rows - len(rows))] + [(0, 0)] * (rows.ndim - 1))


def _pieces(num_tokens: int) -> list[tuple[int, int]]:
    """Where tokens begin that are finished at a time, and as how many; the last are filled up."""
    most, least = FINISHED_ROWS
    many = num_tokens // most * most
    return [(i, most) for i in range(0, many, most)] + [(i, least) for i in range(many, num_tokens, least)]


def move_size(num_blocks: int) -> int:
    """Of a move of several blocks at once: 1, 4, 16, ..."""
    return 1 << 2 * -(-(num_blocks - 1).bit_length() // 2)


def _filled_up(blocks: Sequence[int]) -> Ints:
    """With the padding block, of which it does not matter what it holds."""
    return _padded(np.array(blocks, np.int32), move_size(len(blocks)))


def _write_size(num_rows: int, most: int) -> int:
    """Of a write to several slots at once: 1, 8, 64, ... or all."""
    size = 1
    while size < num_rows:
        size *= 8
    return min(size, most)


def keep_compiled(cache_dir: Path) -> Path | None:
    """Lets JAX keep what was compiled for the next start, unless the user has set a place for it that is the
    user's own. On GPUs also a folder for ExecutableCache."""
    chosen = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if chosen and "://" not in chosen and not cpu.claim_folder(Path(chosen)):
        log.warning("%s belongs to another user or is writable by others: nothing is loaded from it", chosen)
        reset_cache()  # it may be open already
        chosen = None
    if chosen is None:
        jax.config.update("jax_compilation_cache_dir", str(private_folder(cache_dir / "compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", KEPT_S)
    return private_folder(cache_dir / "programs") if jax.default_backend() == "gpu" else None


def allocate_pages(spec: ModelSpec, mesh: Mesh, num_blocks: int, devices: Devices) -> Pages:
    lie = NamedSharding(mesh, PAGES)
    zeros = jax.jit(choose_kernels(spec, devices).empty_pages, static_argnums=(0, 1), out_shardings=lie)
    return [zeros(shape, devices.kv_dtype) for shape in page_shapes(spec, devices, num_blocks)]
