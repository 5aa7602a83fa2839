"""The GPU's attention kernels: right beside the reference, then their speed, one line for each case.

Of a decode the bytes counted are the keys and values of the contexts, of a prefill the operations of what is
seen. Calls are unrolled in one program, as layers are, over tables that point to different places, so that
the cache does not help. Writing K and V is included, and also timed on its own.
With --sweep every tiling of a list is timed, else the one that the kernels choose.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.kernels import gpu, reference
from hex_llm.kernels.attention import Batch, Mask

KV_HEADS, GROUP, HEAD_DIM = 8, 4, 128
TOKEN_BYTES = KV_HEADS * 2 * HEAD_DIM * 2
CALLS, REPEATS = 64, 5
MIN_BYTES = 2**30  # of the pages that calls go round in: twenty times the cache
NO_OPTIONS = gpu.Options(Mask(), HEAD_DIM**-0.5, None)


class Case(NamedTuple):
    name: str
    rows: tuple[tuple[int, int], ...]  # (cached, new tokens) of each sequence
    block_size: int = 16
    width: int = 0  # tokens that tables have room for; 0: the longest's
    prefill: bool = False

    @property
    def num_bytes(self) -> int:
        return TOKEN_BYTES * sum(cached + new for cached, new in self.rows)

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
        seen = sum(new * cached + new * (new + 1) // 2 for cached, new in self.rows)
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
    prefills((0, 700), (0, 3000), (1000, 300), (0, 96)),
    prefills((0, 512)),
    prefills((7936, 256)),
    prefills((0, 8192), block_size=64),
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
        empty = jnp.array(tables[:0])
        found.append(
            Batch(*ints, *((empty, jnp.array(tables)) if case.prefill else (jnp.array(tables), empty)))
        )
    return found, num_blocks


@partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


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


def attend(
    case: Case, tiling: gpu.Tiling | None, q: jax.Array, kv: jax.Array, pages: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """gpu.paged_attention with a given tiling."""
    pages, tickets = gpu.write_kv(kv, kv, pages, batch.slots)
    if case.prefill:
        tiling = tiling or gpu.prefill_tiling(q, pages, batch.prefill_tables)
        rows = q, batch.positions, batch.sequences
        return gpu.prefill(*rows, pages, batch.prefill_tables, tickets, NO_OPTIONS, tiling), pages
    tiling = tiling or gpu.decode_tiling(q, pages, batch.decode_tables)
    tables = batch.decode_tables
    return gpu.attend(q, batch.positions, None, pages, tables, tickets, NO_OPTIONS, tiling), pages


def timed(case: Case, tilings: list[gpu.Tiling | None]) -> None:
    found, num_blocks = batches(case)
    pages = normal((num_blocks, case.block_size, KV_HEADS, 2, HEAD_DIM), jnp.bfloat16, 0)
    num_rows = len(found[0].positions)
    q = normal((num_rows, KV_HEADS, GROUP, HEAD_DIM), jnp.bfloat16, 1)
    kv = normal((num_rows, KV_HEADS, HEAD_DIM), jnp.bfloat16, 2)

    def compiled(tiling: gpu.Tiling | None) -> Any:
        one = jax.jit(partial(attend, case, tiling))

        def many(q: jax.Array, pages: jax.Array, kv: jax.Array, found: list[Batch]) -> Any:
            for i in range(case.calls):
                q, pages = one(q, kv, pages, found[i % len(found)])
            return q, pages

        try:
            return jax.jit(many, donate_argnums=(0, 1)).lower(q, pages, kv, found).compile()
        except Exception as error:
            return str(error)[:100]

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, tilings))
    for tiling, program in zip(tilings, programs, strict=True):
        about = f"{case.name:32} block {case.block_size:4} width {case.width:6}  "
        if tiling is not None:
            about += "rows {:3} keys {:3} splits {:2} min {:4} warps {} stages {}  ".format(
                *vars(tiling).values()
            )
        if isinstance(program, str):
            print(about + program, flush=True)
            continue

        def run(program: Any = program) -> Any:
            nonlocal q, pages
            q, pages = program(q, pages, kv, found)
            return q

        print(about + case.rate(seconds(run) / case.calls), flush=True)


def decode_sweep(case: Case) -> list[gpu.Tiling | None]:
    """(keys, warps, stages, splits, min_split) worth trying for so many sequences of KV_HEADS heads."""
    num_seqs = len(case.rows)
    if num_seqs == 1:
        tried = [(64, 2, 5, 32, 128), (128, 4, 5, 16, 128), (128, 4, 2, 32, 128)]
    elif num_seqs <= 8:
        tried = [(64, 2, 5, 8, 256), (64, 2, 3, 16, 256), (128, 4, 2, 16, 512)]
    elif num_seqs <= 16:
        tried = [
            (64, 2, 3, 4, 256),
            (64, 2, 5, 4, 1024),
            (64, 2, 3, 8, 512),
            (64, 4, 3, 8, 512),
            (128, 4, 2, 8, 1024),
        ]
    else:
        tried = [(128, 4, 2, 16, 2048), (128, 4, 2, 16, 1024), (64, 4, 3, 16, 1024), (64, 4, 3, 16, 2048)]
    return [gpu.Tiling(16, *shape[:1], *shape[3:], *shape[1:3]) for shape in tried]


def prefill_sweep(case: Case) -> list[gpu.Tiling | None]:
    shapes = [(128, 64, 8, 5), (256, 64, 8, 3), (256, 64, 8, 5), (256, 64, 16, 5), (128, 128, 8, 3)]
    return [gpu.Tiling(*shape[:2], 1, 512, *shape[2:]) for shape in shapes]


def check() -> None:
    """Random batches of all kinds beside the reference in float32."""
    static = ("mask", "scale", "softcap")
    kinds: Iterator[tuple[Any, ...]] = itertools.chain(
        ((jnp.bfloat16, g, 128, Mask(), None, 16) for g in (1, 3, 4, 7, 32)),
        ((jnp.bfloat16, 4, h, Mask(window=700), 20.0, 32) for h in (64, 96, 256)),
        ((jnp.float32, g, h, Mask(), None, 16) for g, h in ((4, 128), (7, 64), (2, 96), (4, 256))),
        ((d, 4, 128, Mask(chunk=512), None, 2048) for d in (jnp.bfloat16, jnp.float32)),
    )

    def one(kind: tuple[Any, ...]) -> str:
        dtype, group, head_dim, mask, softcap, block_size = kind
        rows = ((0, 300), (1000, 40), (0, 1), (3000, 3), (500, 700), (5, 1), (0, 1), (2047, 1), (4095, 1))
        case = Case("", rows, block_size, prefill=True)
        [batch], num_blocks = batches(case)[0][:1], batches(case)[1]
        turned = jnp.concatenate(
            [jnp.arange(len(batch.positions))[-4:], jnp.arange(len(batch.positions))[:-4]]
        )
        tables, first = batch.prefill_tables, len(rows) - 4
        sequences = (batch.sequences[turned] - first) % len(rows)
        batch = Batch(batch.positions[turned], sequences, batch.slots[turned], tables[first:], tables[:first])
        num_rows = len(batch.positions)
        q = normal((num_rows, 2, group, head_dim), dtype, 1)
        k, v = normal((num_rows, 2, head_dim), dtype, 2), normal((num_rows, 2, head_dim), dtype, 3)
        pages = normal((num_blocks, block_size, 2, 2, head_dim), dtype, 4)
        options = {"mask": mask, "scale": head_dim**-0.5, "softcap": softcap}
        got, stored = jax.jit(gpu.paged_attention, static_argnames=static)(q, k, v, pages, batch, **options)
        exact = [x.astype(jnp.float32) for x in (q, k, v, pages)]
        with jax.default_matmul_precision("highest"):
            wanted, wrote = jax.jit(reference.paged_attention, static_argnames=static)(
                *exact, batch, **options
            )
        error = jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
        most = jnp.max(jnp.abs(got.astype(jnp.float32) - wanted))
        same = bool(jnp.all(stored[1:] == wrote[1:].astype(dtype)))
        limit = 2e-6 if dtype == jnp.float32 else 6e-3
        verdict = "ok" if same and error < limit else "WRONG"
        return (
            f"check {dtype.__name__} {kind[1:]}: error {error:.1e}, most {most:.1e}, written {same} {verdict}"
        )

    def guarded(kind: tuple[Any, ...]) -> str:
        try:
            return one(kind)
        except Exception as error:
            return f"check {kind}: FAILED {str(error)[:300]}"

    with ThreadPoolExecutor(8) as pool:
        for about in pool.map(guarded, kinds):
            print(about, flush=True)


def write() -> None:
    """K and V of some tokens into 8 donated layers of 512 MiB, ours and XLA's scatter."""
    functions = (
        ("gpu.write_kv", lambda *arguments: gpu.write_kv(*arguments)[0]),
        ("reference.write_kv", reference.write_kv),
    )
    for num_rows, (name, function) in itertools.product((1, 128, 2048), functions):
        pages = [normal((8192, 16, KV_HEADS, 2, HEAD_DIM), jnp.bfloat16, i) for i in range(8)]
        kv = normal((num_rows, KV_HEADS, HEAD_DIM), jnp.bfloat16, 1)
        slots = jnp.array(np.random.default_rng(0).permutation(8192 * 16)[:num_rows], jnp.int32)
        one = jax.jit(function)

        @partial(jax.jit, donate_argnums=0)
        def many(pages: list[jax.Array], kv: jax.Array, slots: jax.Array, one: Any = one) -> Any:
            for i in range(CALLS):
                pages[i % 8] = one(kv, kv, pages[i % 8], slots)
            return pages

        def run(many: Any = many, kv: jax.Array = kv, slots: jax.Array = slots) -> Any:
            nonlocal pages
            pages = many(pages, kv, slots)
            return pages

        print(f"write {num_rows:4} rows {name:20} {seconds(run) / CALLS * 1e6:8.1f} us", flush=True)


def compare() -> None:
    """cuDNN's attention, which reads no pages."""
    for num_rows in (2048, 8192):
        q = normal((1, num_rows, KV_HEADS * GROUP, HEAD_DIM), jnp.bfloat16, 0)
        k = normal((1, num_rows, KV_HEADS, HEAD_DIM), jnp.bfloat16, 1)

        @jax.jit
        def many(q: jax.Array, k: jax.Array) -> jax.Array:
            for _ in range(16):
                q = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
            return q

        each = seconds(lambda: many(q, k)) / 16  # noqa: B023
        print(f"cuDNN causal {num_rows}: {prefills((0, num_rows)).rate(each)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("check", "decode", "prefill", "write", "compare")
    parser.add_argument("parts", nargs="*", choices=parts, default=list(parts))
    parser.add_argument("--sweep", action="store_true")
    flags = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    for part in flags.parts:
        start = time.perf_counter()
        if part == "decode":
            for case in DECODES if flags.sweep else DECODES + MORE_DECODES:
                timed(case, decode_sweep(case) if flags.sweep else [None])
        elif part == "prefill":
            for case in PREFILLS if flags.sweep else PREFILLS + MORE_PREFILLS:
                timed(case, prefill_sweep(case) if flags.sweep else [None])
        else:
            {"check": check, "write": write, "compare": compare}[part]()
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
