"""The GPU's attention kernels: right beside the reference, then their speed, one line for each case.

Of a decode the bytes counted are the keys and values of the contexts, of a prefill the operations of what is
seen. Calls are unrolled in one program, as layers are, over tables that point to different places, so that
the cache does not help. Writing K and V is included, and also timed on its own.
Prefills are timed twice: by our kernel alone, and begun by cuDNN. With --sweep every tiling of a list is
timed, else the one that the kernels choose. --kv=int8 or fp8: with pages of 8 bits, whose bytes are counted.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels import gpu, gpu_cudnn, reference
from hex_llm.kernels.attention import LARGEST, Batch, KVPages, Mask, Options, QuantizedPages, quantized

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
KV_DTYPES = {"int8": np.dtype(np.int8), "fp8": np.dtype(jnp.float8_e4m3fn)}
CALLS, REPEATS = 64, 5
MIN_BYTES = 2**30  # of the pages that calls go round in: twenty times the cache


class Case(NamedTuple):
    name: str
    rows: tuple[tuple[int, int], ...]  # (cached, new tokens) of each sequence
    block_size: int = 16
    width: int = 0  # tokens that tables have room for; 0: the longest's
    prefill: bool = False
    window: int | None = None
    kv_dtype: Any = np.dtype(jnp.bfloat16)

    @property
    def num_bytes(self) -> int:
        each = HEAD_DIM * self.kv_dtype.itemsize + 4 * (self.kv_dtype in LARGEST)
        return KV_HEADS * 2 * each * sum(cached + new for cached, new in self.rows)

    @property
    def options(self) -> Options:
        return Options(Mask(self.window), HEAD_DIM**-0.5, None)

    @property
    def calls(self) -> int:
        """In one program: enough that the host has no part in the time."""
        return CALLS if self.operations < 2e10 else CALLS // 4

    def rate(self, seconds: float) -> str:
        if self.prefill:
            return f"{seconds * 1e6:8.1f} us {self.operations / seconds / 1e12:6.0f} TFLOP/s"
        return f"{seconds * 1e6:8.1f} us {self.num_bytes / seconds / 1e12:6.2f} TB/s"

    @property
    def operations(self) -> int:
        most = self.window or 2**30
        seen = sum(int(np.arange(c + 1, c + n + 1).clip(max=most).sum()) for c, n in self.rows)
        return 4 * HEAD_DIM * KV_HEADS * GROUP * seen


def decodes(num_seqs: int, length: int, **options: Any) -> Case:
    return Case(f"decode {num_seqs} x {length}", ((length - 1, 1),) * num_seqs, **options)


def ragged_decodes(num_seqs: int, longest: int, **options: Any) -> Case:
    lengths = np.linspace(1, longest, num_seqs).astype(int)
    np.random.default_rng(0).shuffle(lengths)
    rows = tuple((int(n) - 1, 1) for n in lengths)
    return Case(f"decode {num_seqs} x 1..{longest}", rows, **options)


def prefills(*rows: tuple[int, int], **options: Any) -> Case:
    return Case("prefill " + " ".join(f"{c}+{n}" for c, n in rows), rows, prefill=True, **options)


DECODES = [
    decodes(128, 1536),
    ragged_decodes(128, 4096),
    decodes(64, 1536),
    ragged_decodes(64, 4096),
    decodes(32, 1536),
    decodes(16, 2048),
    ragged_decodes(16, 4096),
    decodes(4, 8192),
    decodes(1, 32768),
    decodes(1, 2048),
]
MORE_DECODES = [
    decodes(256, 1536),
    decodes(128, 2048),
    decodes(1, 128),
    decodes(1, 131072),
    decodes(1, 2048, width=131072),
    decodes(128, 1536, width=131072),
    *(decodes(128, 1536, block_size=b) for b in (8, 32, 2048)),
    *(decodes(1, 32768, block_size=b) for b in (8, 32, 2048)),
]
PREFILLS = [prefills((0, 8192)), prefills((0, 2048)), prefills((8160, 32))]
MORE_PREFILLS = [
    prefills((6144, 2048)),
    prefills(*((0, 1024),) * 8),
    prefills(*((0, 1800),) * 4),
    prefills(*((0, 256),) * 32),
    prefills((0, 700), (0, 3000), (1000, 300), (0, 96)),
    prefills((0, 1024)),
    prefills((0, 512)),
    prefills((7936, 256)),
    prefills((0, 8192), window=1024),
]


def batches(case: Case, seed: int = 0) -> tuple[list[Batch], int]:
    """Batches that together point to MIN_BYTES of pages or more, and the number of blocks."""
    rng = np.random.default_rng(seed)
    longest = max(cached + new for cached, new in case.rows)
    width = -(-max(longest, case.width) // case.block_size)
    needed = [-(-(cached + new) // case.block_size) for cached, new in case.rows]
    copies = min(-(-MIN_BYTES // case.num_bytes), CALLS)
    num_blocks = copies * sum(needed) + 1
    blocks = iter(rng.permutation(num_blocks - 1) + 1)
    found = []
    for _ in range(copies):
        tables = np.zeros((len(needed), width), np.int32)
        for row, n in zip(tables, needed, strict=True):
            row[:n] = list(itertools.islice(blocks, n))
        sequences = np.repeat(np.arange(len(needed)), [new for _, new in case.rows])
        positions = np.concatenate([np.arange(c, c + n) for c, n in case.rows])
        slots = tables[sequences, positions // case.block_size] * case.block_size
        slots += positions % case.block_size
        ints = [jnp.array(x, jnp.int32) for x in (positions, sequences, slots)]
        num_decodes, max_chunks = (0, max(len(needed), 32)) if case.prefill else (len(needed), 0)
        found.append(Batch(*ints, jnp.array(tables), jnp.int32(num_decodes), max_chunks))
    return found, num_blocks


@partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@partial(jax.jit, static_argnums=(0, 1))
def normal_pages(shape: tuple[int, ...], dtype: Any, seed: int) -> KVPages:
    if dtype not in LARGEST:
        return normal(shape, dtype, seed)
    words, scales = quantized(jnp.split(normal(shape, jnp.bfloat16, seed), 2, axis=-1), dtype)
    return QuantizedPages(words, scales.transpose(0, 3, 2, 1), dtype)


def seconds(run: Callable[[], Any]) -> float:
    """The median of some runs, each of several programs in a row."""
    jax.block_until_ready(run())
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(4):
            out = run()
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / 4)
    return statistics.median(found)


TRACING = Lock()  # programs are compiled beside each other, and what is patched is everyone's


class Way(NamedTuple):
    # Of the tiling that is chosen; spare items are those of each block.
    changes: Mapping[str, int] = MappingProxyType({})
    cudnn: bool = False  # begins

    def __str__(self) -> str:
        about = "cuDNN, ours  " if self.cudnn else ""
        return about + "".join(f"{name} {value:3}  " for name, value in self.changes.items())

    def tiling(self, choose: Any, *arguments: Any) -> gpu.Tiling:
        chosen, changes = choose(*arguments), dict(self.changes)
        if "num_spare" in changes:
            changes["num_spare"] *= chosen.num_blocks
        return replace(chosen, **changes)


def attend(
    case: Case, way: Way, q: jax.Array, kv: jax.Array, pages: KVPages, batch: Batch
) -> tuple[jax.Array, KVPages]:
    """gpu.paged_attention in a given way."""
    name = "prefill_tiling" if case.prefill else "decode_tiling"
    tiling = partial(way.tiling, getattr(gpu, name))
    with TRACING, patch.object(gpu, name, tiling), patch.object(gpu, "cudnn_begins", lambda *_: way.cudnn):
        return gpu.paged_attention(q, kv, kv, pages, batch, case.options)


def timed(case: Case, ways: list[Way]) -> None:
    found, num_blocks = batches(case)
    pages = normal_pages((num_blocks, case.block_size, KV_HEADS, 2, HEAD_DIM), case.kv_dtype, 0)
    num_rows = len(found[0].positions)
    q = normal((num_rows, KV_HEADS, GROUP, HEAD_DIM), jnp.bfloat16, 1)
    kv = normal((num_rows, KV_HEADS, HEAD_DIM), jnp.bfloat16, 2)

    def compiled(way: Way) -> Any:
        one = jax.jit(partial(attend, case, way))

        def many(q: jax.Array, pages: KVPages, kv: jax.Array, found: list[Batch]) -> Any:
            for i in range(case.calls):
                q, pages = one(q, kv, pages, found[i % len(found)])
            return q, pages

        try:
            return jax.jit(many, donate_argnums=(0, 1)).lower(q, pages, kv, found).compile()
        except Exception as error:
            return str(error)[:100]

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, ways))
    for way, program in zip(ways, programs, strict=True):
        about = f"{case.name[:40]:40} {case.kv_dtype} block {case.block_size:4} width {case.width:6}  "
        about += f"window {case.window}  {way}" if case.window else str(way)
        if isinstance(program, str):
            print(about + program, flush=True)
            continue

        def run(program: Any = program) -> Any:
            nonlocal q, pages
            q, pages = program(q, pages, kv, found)
            return q

        print(about + case.rate(seconds(run) / case.calls), flush=True)


def decode_sweep(case: Case) -> list[Way]:
    """(keys, warps, stages, spare items of a block, min_split) worth trying for so many sequences."""
    num_seqs = len(case.rows)
    if num_seqs == 1:
        tried = [(64, 2, 5, 31, 128), (128, 4, 5, 15, 128), (128, 4, 2, 31, 128)]
    elif num_seqs <= 8:
        tried = [(64, 2, 5, 3, 256), (64, 2, 5, 7, 256), (64, 2, 3, 15, 256), (128, 4, 2, 15, 512)]
    elif num_seqs <= 16:
        tried = [(64, 2, 3, 3, 256), (64, 2, 5, 3, 1024), (64, 4, 3, 7, 512), (128, 4, 2, 7, 1024)]
    else:
        tried = [(128, 4, 2, spare, least) for spare in (1, 3) for least in (512, 1024, 2048)]
        tried += [(64, 4, 3, 1, 1024), (64, 4, 3, 3, 512)]
        if case.kv_dtype in LARGEST:
            tried += [(128, 4, stages, 1, 2048) for stages in (1, 3, 4)]
            tried += [(64, 4, 4, 1, 2048), (64, 2, 3, 1, 2048), (256, 8, 2, 1, 2048), (256, 4, 2, 1, 2048)]
    names = ("keys", "warps", "stages", "num_spare", "min_split")
    return [Way(dict(zip(names, shape, strict=True))) for shape in tried]


def prefill_sweep(case: Case) -> list[Way]:
    shapes = [(64, 8, 3), (64, 8, 5), (64, 16, 5), (128, 8, 3)]
    changes = [dict(zip(("keys", "warps", "stages"), shape, strict=True)) for shape in shapes]
    return [Way(change, cudnn) for change in changes for cudnn in (False, True)]


CHECKED = ((0, 300), (1000, 40), (0, 1), (3000, 3), (500, 700))  # prefills
CHECKED_DECODES = ((5, 1), (0, 1), (2047, 1), (4095, 1))
PADDING = 60  # rows of a checked step


def checked_batch(prefilled: tuple[tuple[int, int], ...], block_size: int) -> tuple[Batch, int]:
    """A step with decodes, prefills and padding, and the number of blocks."""
    found, num_blocks = batches(Case("", prefilled + CHECKED_DECODES, block_size, prefill=True))
    batch, num_seqs, num_decodes = found[0], len(prefilled), len(CHECKED_DECODES)

    def turned(x: jax.Array) -> jax.Array:
        return jnp.pad(jnp.roll(x, num_decodes), (0, PADDING))

    rows = (batch.rows - num_seqs) % (num_seqs + num_decodes)
    places = turned(batch.positions), turned(rows), turned(batch.kv_slots)
    return Batch(
        *places, jnp.roll(batch.tables, num_decodes, 0), jnp.int32(num_decodes), num_seqs
    ), num_blocks


def checked(prefilled: tuple[tuple[int, int], ...], kind: tuple[Any, ...], kv_dtype: Any) -> str:
    dtype, group, head_dim, mask, softcap, block_size = kind
    batch, num_blocks = checked_batch(prefilled, block_size)
    num_rows = len(batch.positions)
    q = normal((num_rows, 2, group, head_dim), dtype, 1)
    k, v = normal((num_rows, 2, head_dim), dtype, 2), normal((num_rows, 2, head_dim), dtype, 3)
    pages = normal_pages((num_blocks, block_size, 2, 2, head_dim), kv_dtype or np.dtype(dtype), 4)
    options = Options(mask, head_dim**-0.5, softcap)
    got, stored = jax.jit(partial(gpu.paged_attention, options=options))(q, k, v, pages, batch)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    with jax.default_matmul_precision("highest"):
        wanted, wrote = jax.jit(partial(reference.paged_attention, options=options))(*exact, pages, batch)
    finite = bool(jnp.all(jnp.isfinite(got)))
    got, wanted = got[:-PADDING].astype(jnp.float32), wanted[:-PADDING]
    error, most = jnp.linalg.norm(got - wanted) / jnp.linalg.norm(wanted), jnp.max(jnp.abs(got - wanted))
    pairs = list(zip(jax.tree.leaves(stored), jax.tree.leaves(wrote), strict=True))
    # A division may be rounded otherwise, so that a number in the middle of two becomes the other one.
    most_differing = 0 if kv_dtype is None else 1e-4
    same = all(bool(jnp.mean(ours[1:] != theirs[1:]) <= most_differing) for ours, theirs in pairs)
    limit = 6e-3 if dtype == jnp.bfloat16 else 2e-6 if kv_dtype is None else 1e-4
    verdict = "ok" if same and finite and error < limit else "WRONG"
    about = f"check {dtype.__name__} {kv_dtype or ''} {kind[1:]} {len(prefilled)} prefills"
    return f"{about}: error {error:.1e}, most {most:.1e}, written {same}, finite {finite} {verdict}"


def check(kv_dtype: Any) -> None:
    """Random batches of all kinds beside the reference in float32: by our kernel, then begun by cuDNN."""
    plain = [(jnp.bfloat16, g, 128, Mask(), None, 16) for g in (1, 3, 4, 7, 32)]
    ours: list[tuple[Any, ...]] = [
        *plain,
        *((jnp.bfloat16, 4, h, Mask(window=700), 20.0, 32) for h in (64, 96, 256)),
        *((jnp.float32, g, h, Mask(), None, 16) for g, h in ((4, 128), (7, 64), (2, 96), (4, 256))),
        *((d, 4, 128, Mask(attention_chunk=512), None, 2048) for d in (jnp.bfloat16, jnp.float32)),
    ]
    windows = [(jnp.bfloat16, 4, h, Mask(window=300), None, 32) for h in (64, 96, 128, 256)]

    def guarded(prefilled: tuple[tuple[int, int], ...], kind: tuple[Any, ...]) -> str:
        try:
            return checked(prefilled, kind, kv_dtype)
        except Exception as error:
            return f"check {kind}: FAILED {str(error)[:300]}"

    for least, kinds in ((2**30, ours), (1, plain + windows)):
        print("ours" if least > 1 else "partial_softmax by cuDNN", flush=True)
        with mock.patch.object(gpu, "MIN_CUDNN_ROWS", least), ThreadPoolExecutor(8) as pool:
            for about in pool.map(guarded, itertools.repeat(CHECKED), kinds):
                print(about, flush=True)
            if least == 1:
                print(guarded(CHECKED[-1:], plain[2]), flush=True)
                can = gpu_cudnn.can_attend
                print("cuDNN can:", {h: can(2, 4, h, 300) for h in (64, 96, 128, 256)}, flush=True)


def write(kv_dtype: Any) -> None:
    """K and V of some tokens into 8 donated layers of 512 MiB, ours and XLA's scatter."""
    functions = (
        ("gpu.write_kv", lambda *arguments: gpu.write_kv(*arguments)[0]),
        ("reference.write_kv", reference.write_kv),
    )
    for num_rows, (name, function) in itertools.product((1, 128, 2048), functions):
        shape = (8192, 16, KV_HEADS, 2, HEAD_DIM)
        pages = [normal_pages(shape, kv_dtype or np.dtype(jnp.bfloat16), i) for i in range(8)]
        kv = normal((num_rows, KV_HEADS, HEAD_DIM), jnp.bfloat16, 1)
        slots = jnp.array(np.random.default_rng(0).permutation(8192 * 16)[:num_rows], jnp.int32)
        one = jax.jit(function)

        @partial(jax.jit, donate_argnums=0)
        def many(pages: list[KVPages], kv: jax.Array, slots: jax.Array, one: Any = one) -> Any:
            for i in range(CALLS):
                pages[i % 8] = one(kv, kv, pages[i % 8], slots)
            return pages

        def run(many: Any = many, kv: jax.Array = kv, slots: jax.Array = slots) -> Any:
            nonlocal pages
            pages = many(pages, kv, slots)
            return pages

        print(f"write {num_rows:4} rows {name:20} {seconds(run) / CALLS * 1e6:8.1f} us", flush=True)


def compare(_: Any) -> None:
    """cuDNN's attention, which reads no pages."""
    for num_rows in (2048, 8192):
        q = normal((1, num_rows, KV_HEADS * GROUP, HEAD_DIM), jnp.bfloat16, 0)
        k = normal((1, num_rows, KV_HEADS, HEAD_DIM), jnp.bfloat16, 1)

        def dense(q: jax.Array, k: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")

        def packed(lengths: list[int], q: jax.Array, k: jax.Array) -> jax.Array:
            grouped = q.reshape(num_rows, KV_HEADS, GROUP, HEAD_DIM)  # noqa: B023
            tokens = jnp.array(lengths, jnp.int32)
            out = gpu_cudnn.causal(grouped, k[0], k[0], tokens, window=None, scale=HEAD_DIM**-0.5)[0]
            return out.reshape(q.shape)

        ways = {"dense": dense} | {
            f"with {n} sequences, of which one is not empty": partial(packed, [num_rows] + [0] * (n - 1))
            for n in (1, 2, 8)
        }
        for name, one in ways.items():

            @jax.jit
            def many(q: jax.Array, k: jax.Array, one: Any = one) -> jax.Array:
                for _ in range(16):
                    q = one(q, k)
                return q

            start = time.perf_counter()
            compiled = many.lower(q, k).compile()
            took = time.perf_counter() - start
            each = seconds(lambda: compiled(q, k)) / 16  # noqa: B023
            rate = prefills((0, num_rows)).rate(each)
            print(f"cuDNN causal {num_rows} {name}: {rate}, compiled in {took:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("check", "decode", "prefill", "write", "compare")
    parser.add_argument("parts", nargs="*", choices=parts, default=list(parts))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--kv", choices=KV_DTYPES)
    flags = parser.parse_args()
    kv_dtype = KV_DTYPES.get(flags.kv)
    changes = {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    for part in flags.parts:
        start = time.perf_counter()
        if part == "decode":
            for case in DECODES if flags.sweep else DECODES + MORE_DECODES:
                case = case._replace(**changes)
                timed(case, decode_sweep(case) if flags.sweep else [Way()])
        elif part == "prefill":
            for case in PREFILLS if flags.sweep else PREFILLS + MORE_PREFILLS:
                case = case._replace(**changes)
                timed(case, prefill_sweep(case) if flags.sweep else [Way(), Way(cudnn=True)])
        else:
            {"check": check, "write": write, "compare": compare}[part](kv_dtype)
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
