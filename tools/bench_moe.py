"""The GPU's routed experts: right beside all experts in float32, then their speed, one line for each case.

Bytes are the weights of the experts that somebody chose, operations those of the pairs of a token and an
expert. Experts are chosen at random. Calls follow one another in one program, as layers do; one layer's
weights are many times the cache.

    python -m tools.bench_moe [check] [speed] [sweep] [--models mixtral,scout] [--tokens 1,8,64,256,2048,8192]
        [--quantized int4|int8|e2m1|fp8]

`speed` also times all experts for all tokens, unless they are quantized; `sweep` a list of tilings for each
of the two products on its own.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.execution.weight_layouts import in_words
from hex_llm.kernels import experts, gpu_experts
from hex_llm.kernels.experts import ExpertOptions, RoutedExperts
from hex_llm.kernels.gpu_experts import Product, Tiling
from hex_llm.kernels.gpu_quantized import QuantizedWords
from hex_llm.kernels.gpu_routing import Blocks, blocks_of
from hex_llm.models.linear import Dense
from hex_llm.models.params import Rounding
from hex_llm.models.quantized import quantize

REPEATS = 3
FEW = (  # (columns, depth, splits, warps, stages) for blocks of few rows
    (16, 256, 1, 4, 4),
    (32, 128, 1, 4, 4),
    (32, 256, 1, 4, 3),
    (64, 64, 1, 4, 5),
    (64, 128, 1, 4, 3),
    (64, 128, 1, 8, 4),
    (128, 64, 1, 4, 4),
    (128, 64, 1, 8, 4),
)
MANY = (  # (columns, depth, warps, stages, together)
    (64, 64, 4, 4, 16),
    (128, 32, 8, 5, 16),
    (128, 64, 4, 3, 16),
    (128, 64, 8, 3, 16),
    (128, 64, 8, 4, 8),
    (128, 64, 8, 4, 16),
    (256, 64, 8, 3, 16),
    (256, 64, 8, 4, 16),
)
SPLITS = (1, 2, 4, 8)
WORDS = (  # (columns, warps, stages) for quantized experts
    (32, 4, 3),
    (64, 4, 2),
    (64, 4, 3),
    (64, 4, 4),
    (128, 4, 2),
    (128, 4, 3),
)
ROUNDINGS = {
    "int4": Rounding(4, 128),
    "int8": Rounding(8, 128),
    "e2m1": Rounding(4, 32, to_float=True),
    "fp8": Rounding(8, 128, to_float=True),
}


class Shape(NamedTuple):
    num: int
    per_token: int
    inputs: int
    width: int
    scale_input: bool

    def weights(self, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
        up = normal((self.num, 2, self.width, self.inputs), dtype, 0, self.inputs**-0.5)
        return up, normal((self.num, self.inputs, self.width), dtype, 1, self.width**-0.5)

    def quantized(self, to: Rounding | None) -> tuple[Any, Any]:
        if to is None:
            return self.weights()
        up, down = self.weights()
        return _words(Dense(up, 3), to), _words(Dense(down, 2), to)

    def routes(self, num_tokens: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        rng = np.random.default_rng(seed)
        chosen = rng.permuted(np.tile(np.arange(self.num), (num_tokens, 1)), axis=1)[:, : self.per_token]
        scores = rng.uniform(0.1, 1, chosen.shape)
        return jnp.array(chosen, jnp.int32), jnp.array(scores, jnp.float32)

    def rate(self, each: float, chosen: jax.Array, weights: Any, part: float = 1.0) -> str:
        """`part`: of the operations of an expert."""
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        used = len(np.unique(np.asarray(chosen))) / self.num * held / each / 1e12
        operations = 6 * self.inputs * self.width * part * chosen.size
        return f"{each * 1e6:9.1f} us {used:6.2f} TB/s {operations / each / 1e12:6.0f} TFLOP/s"


MODELS = {
    "mixtral": Shape(8, 2, 4096, 14336, scale_input=False),
    "scout": Shape(16, 1, 5120, 8192, scale_input=True),
    "qwen3": Shape(128, 8, 2048, 768, scale_input=False),
    "gpt-oss": Shape(32, 4, 2880, 2880, scale_input=False),
}


def _words(dense: Dense, to: Rounding) -> QuantizedWords:
    matrix = quantize(dense, to._replace(group=math.gcd(to.group, dense.array.shape[-1])))
    words: QuantizedWords = in_words(matrix)
    return words


@partial(jax.jit, static_argnums=(0, 1))
def normal(shape: tuple[int, ...], dtype: Any, seed: int, scale: float) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * scale).astype(dtype)


def seconds(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())
    found = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def compiled(function: Any, arguments: tuple[Any, ...]) -> Any:
    """The program, or why there is none."""
    try:
        return jax.jit(function).lower(*arguments).compile()
    except Exception as error:
        return str(error).splitlines()[0][:110]


def calls_of(num_tokens: int) -> int:
    """In one program: enough that the host has no part in the time."""
    return 16 if num_tokens <= 256 else 4


def speed(name: str, tokens: list[int], to: Rounding | None) -> None:
    shape = MODELS[name]
    weights = shape.quantized(to)
    forms: dict[str, RoutedExperts] = {"kernel": gpu_experts.fused_moe, "dense": experts.dense}
    if to is not None:
        del forms["dense"]
    for num_tokens in tokens:
        chosen, scores = shape.routes(num_tokens)
        x, calls = normal((num_tokens, shape.inputs), jnp.bfloat16, 2, 1.0), calls_of(num_tokens)
        arguments = (x, chosen, scores, *weights)

        def layers(
            x: jax.Array, *others: jax.Array, fused_moe: RoutedExperts, calls: int = calls
        ) -> jax.Array:
            for _ in range(calls):
                x = x + fused_moe(x, *others, ExpertOptions(jax.nn.silu, shape.scale_input))
            return x

        with ThreadPoolExecutor(8) as pool:
            made = [pool.submit(compiled, partial(layers, fused_moe=v), arguments) for v in forms.values()]
        for form, future in zip(forms, made, strict=True):
            program = future.result()
            about = f"{name:8} {num_tokens:5} tokens {form:7}"
            if isinstance(program, str):
                print(about, program, flush=True)
                continue
            each = seconds(partial(program, *arguments)) / calls
            print(about, shape.rate(each, chosen, weights), flush=True)


def tilings(rows: int, gated: bool, is_quantized: bool) -> list[Tiling]:
    if is_quantized:
        splits = SPLITS if rows <= 32 else (1,)
        return [Tiling(rows, c, 128, 8, s, w, n) for c, w, n in WORDS for s in splits]
    if rows <= 64:
        found = [Tiling(rows, c, d, 8, s, w, n) for c, d, s, w, n in FEW]
        more = SPLITS[1:] if rows <= 32 else ()
        return found + [Tiling(rows, c, 128, 8, s, w, 4) for s in more for c in (32, 64, 128) for w in (4, 8)]
    halves = 2 if gated else 1
    return [Tiling(rows, c, d, g, 1, w, n) for c, d, w, n, g in MANY if c * halves <= 256]


def sweep(name: str, tokens: list[int], to: Rounding | None) -> None:
    """The fastest tilings of each product, and those that are chosen, marked with *."""
    shape = MODELS[name]
    up, down = shape.quantized(to)
    for num_tokens in tokens:
        chosen, _ = shape.routes(num_tokens)
        picked = gpu_experts.up_tiling(chosen, up), gpu_experts.down_tiling(chosen, down)
        sizes = {picked[0].rows, max(picked[0].rows // 2, 16)}
        for gated, own in ((True, picked[0]), (False, picked[1])):
            tried = sorted(
                {own, *(t for rows in sizes for t in tilings(rows, gated, to is not None))}, key=str
            )
            weight = up if gated else down
            timed = swept(shape, weight, num_tokens, gated, tried)
            part = 2 / 3 if gated else 1 / 3
            best = sorted(timed.items(), key=lambda one: one[1])[:5]
            for tiling, each in [*best, (own, timed.get(own))]:
                about = f"{name:8} {num_tokens:5} tokens {'up' if gated else 'down':4}"
                shown = " ".join(f"{key} {value}" for key, value in vars(tiling).items())
                rate = "failed" if each is None else shape.rate(each, chosen, weight, part)
                print(about, rate, " *" if tiling == own else "  ", shown, flush=True)


def swept(
    shape: Shape, weight: Any, num_tokens: int, gated: bool, tried: list[Tiling]
) -> dict[Tiling, float]:
    """Seconds of one product for each tiling that compiles."""
    chosen, scores = shape.routes(num_tokens)
    num_pairs, calls = chosen.size, calls_of(num_tokens)
    rows, depth = (num_tokens, shape.inputs) if gated else (num_pairs, shape.width)
    x = normal((rows, depth), jnp.bfloat16, 3, 1.0)
    matrices = weight.reshape(shape.num, -1, depth) if isinstance(weight, jax.Array) else weight

    def products(tiling: Tiling, x: jax.Array, blocks: Blocks, scores: jax.Array, matrices: Any) -> Any:
        gates = ExpertOptions(jax.nn.silu, scale_input=False) if gated and tiling.splits == 1 else None
        product = Product(shape.per_token, gated, gates, True, tiling)
        width = 2 * shape.width if gated else shape.inputs
        out_shape = (tiling.splits, num_pairs, width) if gates is None else (num_pairs, shape.width)
        dtype = jnp.float32 if gates is None else x.dtype

        @jax.jit
        def multiply(x: jax.Array) -> jax.Array:  # traced once
            out = gpu_experts.multiply(x, blocks, scores, matrices, out_shape, dtype, product)
            if not gated or gates is not None:
                return out
            sums = jnp.sum(out, axis=0)
            return jax.nn.silu(sums[:, : shape.width]) * sums[:, shape.width :]

        for _ in range(calls):
            out = multiply(x)
            x = x.at[0, 0].add(out.ravel()[0].astype(x.dtype))  # so that none is left out
        return x

    arguments = {
        rows: (x, blocks_of(chosen, shape.num, rows), scores.reshape(-1), matrices)
        for rows in {tiling.rows for tiling in tried}
    }
    with ThreadPoolExecutor(14) as pool:
        programs = list(
            pool.map(lambda tiling: compiled(partial(products, tiling), arguments[tiling.rows]), tried)
        )
    return {
        tiling: seconds(partial(program, *arguments[tiling.rows])) / calls
        for tiling, program in zip(tried, programs, strict=True)
        if not isinstance(program, str)
    }


def check_quantized(to: Rounding) -> None:
    """Beside the same experts expanded."""
    for shape in (Shape(8, 2, 1024, 1792, scale_input=False), Shape(5, 3, 2880, 2880, scale_input=False)):
        weights = shape.quantized(to)
        exact = [
            words.expanded(jnp.float32).reshape(*words.outputs, -1).astype(jnp.bfloat16) for words in weights
        ]
        for num_tokens in (1, 8, 64, 300, 2048):
            print(checked(shape, jnp.bfloat16, num_tokens, weights, exact), flush=True)


def check() -> None:
    """Beside all experts in float32; the last shape has weights of more than 4 GiB."""
    for shape in (
        Shape(8, 2, 1024, 1792, scale_input=False),
        Shape(5, 3, 1000, 712, scale_input=False),
        Shape(16, 1, 512, 1024, scale_input=True),
        Shape(28, 1, 5120, 8192, scale_input=True),
    ):
        large = shape.num == 28
        for dtype in (jnp.bfloat16,) if large else (jnp.bfloat16, jnp.float32):
            weights = shape.weights(dtype)
            for num_tokens in (3,) if large else (1, 8, 64, 300, 2048):
                print(checked(shape, dtype, num_tokens, weights, weights), flush=True)


def checked(shape: Shape, dtype: Any, num_tokens: int, weights: Sequence[Any], same: Sequence[Any]) -> str:
    options = ExpertOptions(jax.nn.silu, shape.scale_input)
    fused_moe = jax.jit(partial(gpu_experts.fused_moe, options=options))
    routes = shape.routes(num_tokens)
    x = normal((num_tokens, shape.inputs), dtype, 2, 1.0)
    got = fused_moe(x, *routes, *weights)
    with jax.default_matmul_precision("highest"):
        exact = [w.astype(jnp.float32) for w in same]
        wanted = jax.jit(partial(experts.dense, options=options))(x.astype(jnp.float32), *routes, *exact)
    error = jnp.linalg.norm(got.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
    alone = fused_moe(x[:1], *(part[:1] for part in routes), *weights)
    is_same = bool(jnp.all(alone == got[:1]))
    limit = 2e-6 if dtype == jnp.float32 else 6e-3 if weights is same else 8e-3  # quantized: rounded too
    right = bool(error < limit) and (is_same or dtype != jnp.float32)
    verdict = "ok" if right else "WRONG"
    return f"check {dtype.__name__} {tuple(shape)} {num_tokens}: error {error:.1e}, alone {is_same} {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=["check", "speed"], help="check, speed, sweep")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,8,64,256,2048,8192")
    parser.add_argument("--quantized", choices=ROUNDINGS, help="instead of bfloat16")
    flags = parser.parse_args()
    tokens, to = [int(n) for n in flags.tokens.split(",")], ROUNDINGS.get(flags.quantized)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    for part in flags.parts:
        start = time.perf_counter()
        if part == "check":
            check() if to is None else check_quantized(to)
        else:
            for name in flags.models.split(","):
                {"speed": speed, "sweep": sweep}[part](name, tokens, to)
        print(f"-- {part}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
