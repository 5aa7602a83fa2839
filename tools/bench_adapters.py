"""What adapters add on a GPU: right beside the form that asks all slots, then the time of each way to do it.

The four products of a layer of Llama-3.1-8B, 16 slots of rank 16; 64 rows have their adapters in random
order, of more rows 1800 in a row have the same. A line says what a call takes, and how much more than the
base's product. The products behind attention and feed-forward are added to what they were made from, as
cuBLAS does in the decoder. Calls follow one another in one program, with the weights of four layers in turns.

    python tools/bench_adapters.py [--products qkv,out,gate_up,down] [--rows 64,8192] [--only now,64]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from hex_llm.execution.runner import BESIDE, GRAPHS, NO_GRAPHS, UNTRIED_PRODUCTS
from hex_llm.kernels.adapters import Fused, Owners
from hex_llm.kernels.gpu_adapter_tiles import Tiling, tiles_of_many
from hex_llm.kernels.gpu_adapters import FEW_ROWS, Adding, Ranking, add_adapters, ranks_of_rows
from hex_llm.models.adapters import add_by_all
from hex_llm.models.linear import Dense, linear

REPEATS, LAYERS, NUM_SLOTS, NUM_RANKS, RUN = 3, 4, 16, 16, 1800


class Product(NamedTuple):
    outputs: tuple[int, ...]
    inputs: int
    fused: Fused = Fused()
    adds_to: bool = True  # what goes around it

    @property
    def gated(self) -> bool:
        return self.outputs[-1] == 2

    @property
    def activation(self) -> Any:
        return jax.nn.silu if self.gated else None


class Way(NamedTuple):
    """`place`: what adapters add comes "after" the product; "ranks": the first kernel alone; "all": by XLA,
    which is what is expected."""

    place: str = "after"
    first: Ranking | None = None
    second: Adding | Tiling | None = None
    is_concurrent: bool = False  # kernels of a graph that do not need each other


class Layer(NamedTuple):
    matrix: Array
    down: Array
    up: Array


PRODUCTS = {
    "qkv": Product((8, 6, 128), 4096, Fused(1, (4, 5)), adds_to=False),
    "out": Product((4096,), 4096),
    "gate_up": Product((14336, 2), 4096, Fused(1, (1,)), adds_to=False),
    "down": Product((4096,), 14336),
}
TINY = {
    "qkv": Product((2, 4, 32), 512, Fused(1, (2, 3)), adds_to=False),
    "out": Product((128,), 512),
    "gate_up": Product((128, 2), 512, Fused(1, (1,)), adds_to=False),
    "down": Product((128,), 1024),
}


def few_ways(product: Product) -> dict[str, Way]:
    columns, fewer = 64 if product.gated else 32, Ranking(64, 128, 4, 4, 4)
    return {
        "now": Way(),
        "now concurrent": Way(is_concurrent=True),
        "spread": Way(second=Adding(64, columns, 4, 4)),
        "by row": Way(second=Adding(1, 256, 4, 2)),
        "by row concurrent": Way(second=Adding(1, 256, 4, 2), is_concurrent=True),
        "ranks alone: now": Way("ranks"),
        "ranks alone: 4 splits": Way("ranks", fewer),
    }


def many_ways(product: Product) -> dict[str, Way]:
    tilings = [Tiling(64, 64, 8, 4, 3), Tiling(64, 64, 16, 4, 2), Tiling(64, 32, 8, 4, 2)]
    tilings += [Tiling(32, 128, 8, 8, 2), Tiling(16, 256, 16, 4, 3), Tiling(16, 512, 8, 8, 3)]
    ways = {"now": Way()} | {str(tiling): Way(second=tiling) for tiling in tilings}
    ways["ranks alone: now"] = Way("ranks")
    ways["ranks alone: 64 rows"] = Way("ranks", Ranking(64, 128, 1, 4, 4))
    return ways


def call(
    product: Product, way: Way | None, x: Array, around: Array, layer: Layer, owners: Owners
) -> tuple[Array, ...]:
    """One product as a layer has it, without a way without adapters; and what else must be made."""
    matrix = Dense(layer.matrix, len(product.outputs))
    others: tuple[Array, ...] = ()

    def add(out: Array, adder: Any = add_adapters, **how: Any) -> Array:
        up = jnp.moveaxis(layer.up, 0, -2) if adder is add_by_all else layer.up
        given = (out, x, layer.down, up, product.fused, owners, product.activation)
        added: Array = adder(*given, **how)
        return added

    how = {} if way is None else {"first": way.first, "second": way.second}
    place = "base" if way is None else way.place
    if way is None or place == "ranks":
        out = matrix.gated(x, jax.nn.silu) if product.gated else linear(x, matrix)
        others = () if way is None else (ranks_of_rows(x, layer.down, owners, way.first),)
    else:
        out = add(linear(x, matrix), add_by_all) if place == "all" else add(linear(x, matrix), **how)
    return (around + out if product.adds_to else out, *others)


def calls(
    product: Product, way: Way | None, num: int, x: Array, around: Array, layers: list[Layer], which: Array
) -> list[Array]:
    """What must be made: all results, but where one is added to the next by a kernel, in place, the last."""
    found: list[Array] = []
    owners = Owners(which, tiles_of_many(which, NUM_SLOTS))
    in_place = product.adds_to and (way is None or way.place == "ranks")
    one = jax.jit(partial(call, product, way))  # traced once
    for i in range(num):
        out, *others = one(x, around, layers[i % len(layers)], owners)
        around = out if product.adds_to else around
        found += others if in_place and i < num - 1 else [*others, out]
        told = out.ravel()[0] + sum(other.ravel()[0] for other in others)
        x = x.at[0, 0].add((told * 1e-3).astype(x.dtype))
    return found


def shapes(product: Product, rows: int) -> tuple[Any, ...]:
    def half(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    ranks, width = product.fused.num_modules * NUM_RANKS, product.outputs[0]
    layer = Layer(
        half(*product.outputs, product.inputs),
        half(NUM_SLOTS, ranks, product.inputs),
        half(NUM_SLOTS, *product.outputs, NUM_RANKS),
    )
    around = half(rows, width if product.adds_to else 1)
    return half(rows, product.inputs), around, [layer] * LAYERS, jax.ShapeDtypeStruct((rows,), jnp.int32)


@partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], seed: int, scale: float) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * jnp.bfloat16(scale)


def arguments(product: Product, rows: int) -> tuple[Any, ...]:
    """Adapters add as much as the base has."""
    x, around, layers, _ = shapes(product, rows)
    scales = Layer(product.inputs**-0.5, product.inputs**-0.5, NUM_RANKS**-0.5)
    made = [
        Layer(*(normal(a.shape, 3 * i + j, s) for j, (a, s) in enumerate(zip(layer, scales, strict=True))))
        for i, layer in enumerate(layers)
    ]
    rng = np.random.default_rng(0)
    few = rng.permutation(np.arange(rows) % NUM_SLOTS)
    which = few if rows <= FEW_ROWS else rng.permutation(NUM_SLOTS)[np.arange(rows) // RUN % NUM_SLOTS]
    return normal(x.shape, 97, 1.0), normal(around.shape, 98, 1.0), made, jnp.asarray(which + 1, jnp.int32)


def compiled(product: Product, way: Way | None, num: int, rows: int) -> Any:
    """The program, or why there is none."""
    options: dict[str, Any] = (GRAPHS if rows <= FEW_ROWS else NO_GRAPHS) | UNTRIED_PRODUCTS
    if way is not None and way.is_concurrent:
        options = options | BESIDE
    try:
        lowered = jax.jit(partial(calls, product, way, num)).lower(*shapes(product, rows))
        return lowered.compile(compiler_options=options if jax.default_backend() == "gpu" else None)
    except Exception as error:
        return f"does not compile: {str(error).splitlines()[0][:110]}"


def seconds(run: Callable[[], Any], runs: int) -> float:
    """Of one run among several that follow each other, so that the host has no part."""
    jax.block_until_ready(run())
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(runs):
            out = run()
        jax.block_until_ready(out)
        found.append(time.perf_counter() - start)
    return statistics.median(found) / runs


def wrong(got: Array, wanted: Array) -> float:
    """The largest error of a row, relative."""
    got, wanted = (one.reshape(len(one), -1).astype(jnp.float32) for one in (got, wanted))
    return float(jnp.max(jnp.linalg.norm(got - wanted, axis=1) / jnp.linalg.norm(wanted, axis=1)))


def timed(name: str, product: Product, rows: int, programs: dict[str, Any], num: int, runs: int) -> None:
    given = arguments(product, rows)
    wanted, base = programs.pop("all")(*given)[-1], None
    for about, program in programs.items():
        line = f"{name:8}{rows:5} rows  {about:42}"
        if isinstance(program, str):
            print(line, program, flush=True)
            continue
        try:
            error = wrong(program(*given)[-1], wanted)
            each = seconds(partial(program, *given), runs) / num * 1e6
        except Exception as failure:
            print(line, f"does not run: {str(failure).splitlines()[0][:110]}", flush=True)
            continue
        base = each if base is None else base
        is_checked = about != "base" and not about.startswith("ranks alone")
        verdict = "" if not is_checked else f"error {error:.1e} {'ok' if error < 3e-2 else 'WRONG'}"
        print(line, f"{each:9.1f} us {each - base:+8.1f}  {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--products", default=",".join(PRODUCTS))
    parser.add_argument("--rows", default="64,8192")
    parser.add_argument("--only", help="beginnings of the names of ways")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to be interpreted on a CPU")
    flags = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    start, groups = time.perf_counter(), []
    only = tuple(flags.only.split(",")) if flags.only else ""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for rows in map(int, flags.rows.split(",")):
            is_few = rows <= FEW_ROWS
            num, runs = (2, 1) if flags.tiny else (16, 20) if is_few else (LAYERS, 2)
            for name in flags.products.split(","):
                product = (TINY if flags.tiny else PRODUCTS)[name]
                found = few_ways(product) if is_few else many_ways(product)
                kept = {about: way for about, way in found.items() if about.startswith(only)}
                ways: dict[str, Way | None] = {"all": Way("all"), "base": None, **kept}
                made = {about: pool.submit(compiled, product, way, num, rows) for about, way in ways.items()}
                groups.append((name, product, rows, made, num, runs))
    print(f"-- compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for name, product, rows, made, *times in groups:
        timed(name, product, rows, {about: future.result() for about, future in made.items()}, *times)
    print(f"-- all: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
