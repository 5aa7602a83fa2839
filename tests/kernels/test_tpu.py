"""The TPU's attention: what the kernel is given, against the reference, with JAX's own model of the kernel;
with sinks, the kernel itself, interpreted; and as far as it can be lowered without a TPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as bundled
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as bundled_kernel
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from hex_llm.execution.batch import StepShape, batch_of, pack, parts_of
from hex_llm.kernels import reference, tpu
from hex_llm.kernels.attention import Batch, Mask, Options
from hex_llm.types import Chunk, StepPlan

DECODES = [0, 31, 32, 90]  # positions; everything before is cached
CHUNKS = [(0, 45), (60, 37), (95, 1)]  # (cached, new tokens)
CHIP = AbstractMesh(
    (1,),
    ("tp",),
    (AxisType.Auto,),
    abstract_device=AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu"),
)


def ragged(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    *,
    padding: tuple[int, int] = (0, 0),
    block_size: int = 8,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Batch]:
    """The arguments of paged_attention, of a step as the engine packs it; `padding` are more
    tokens and more rows."""
    rng = np.random.default_rng(len(decodes) + block_size)
    spans = [(p, 1) for p in decodes] + chunks
    width = max(-(-(cached + new) // block_size) for cached, new in spans)
    blocks = (rng.permutation(len(spans) * width) + 1).reshape(len(spans), width).tolist()
    rows = [Chunk(i + 1, *span, blocks[i], 0, True) for i, span in enumerate(spans)]
    plan = StepPlan(tuple(rows[: len(decodes)]), tuple(rows[len(decodes) :]))
    num_tokens, num_rows = sum(new for _, new in spans), len(spans)
    shape = StepShape(num_tokens + padding[0], num_rows + padding[1], len(chunks) and len(chunks) + 1)
    tables = np.zeros((shape.num_rows, width), np.int32)
    tables[:num_rows] = blocks
    packed = pack(plan, shape, block_size)
    batch = jax.tree.map(jnp.asarray, batch_of(parts_of(packed, shape), tables, shape))

    def normal(*shape: int) -> jax.Array:
        return jnp.array(rng.standard_normal(shape, dtype=np.float32))

    q = normal(shape.num_tokens, kv_heads, group, head_dim)
    k, v = normal(shape.num_tokens, kv_heads, head_dim), normal(shape.num_tokens, kv_heads, head_dim)
    return q, k, v, normal(len(spans) * width + 1, block_size, kv_heads, 2, head_dim), batch


class Model:
    """JAX's own model of its kernel in the kernel's place.

    It wants numbers where a compiled step has none yet. So a step is compiled twice: once to see what the
    kernel is given, and, when the model has answered, with these answers.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[jax.Array, ...], dict[str, Any]]] = []
        self._answers: list[jax.Array] = []

    def __call__(self, *arguments: jax.Array, **options: Any) -> jax.Array:
        self.calls.append((arguments, options))
        return self._answers[len(self.calls) - 1] if self._answers else arguments[0]

    def run(self, arguments: tuple[Any, ...], options: Options) -> tuple[jax.Array, jax.Array]:
        def seen(*arguments: Any) -> list[tuple[jax.Array, ...]]:
            self.calls.clear()
            tpu.paged_attention(*arguments, options)
            return [given for given, _ in self.calls]

        given = hasty(seen, *arguments)
        self._answers = [
            self._answer(*x, **settings) for x, (_, settings) in zip(given, self.calls, strict=True)
        ]
        self.calls.clear()
        return hasty(partial(tpu.paged_attention, options=options), *arguments)

    def _answer(self, q: jax.Array, pages: jax.Array, *counts: jax.Array, **options: Any) -> jax.Array:
        """Rows that belong to no sequence are not numbers, as they may be on a TPU."""
        counts = tuple(map(np.asarray, counts))
        assert counts[-1][0] > 0, "the kernel would not wait for what it reads ahead"
        bundled.dynamic_validate_inputs(q, pages, *counts, **options)
        sizes = ("num_kv_pages_per_block", "num_queries_per_block")
        options = {name: value for name, value in options.items() if name not in sizes}
        out = hasty(
            lambda q, pages: bundled.ref_ragged_paged_attention(q, pages, *counts, **options), q, pages
        )
        answer = np.full(q.shape, np.nan, np.float32)
        answer[: len(out)] = out
        return jnp.array(answer)


def hasty(function: Any, *arguments: Any) -> Any:
    """Compiled without optimizations: all here is run once."""
    lowered = jax.jit(function).lower(*arguments)
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})(*arguments)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    monkeypatch.setattr(tpu, "ragged_paged_attention", model)
    return model


def check(model: Model, arguments: tuple[Any, ...], mask: Mask, softcap: float | None = None) -> None:
    q, k, v, pages, batch = arguments
    options = Options(mask, 0.25, softcap)
    out, held = model.run((q, k, v, as_held(pages), batch), options)
    expected, stored = hasty(partial(reference.paged_attention, options=options), *arguments)
    np.testing.assert_array_equal(held[1:], as_held(stored)[1:])
    real = np.asarray(arguments[4].kv_slots) > 0
    np.testing.assert_allclose(np.asarray(out)[real], np.asarray(expected)[real], atol=3e-5)


def as_held(pages: jax.Array) -> jax.Array:
    """Pages as the reference has them, as the kernel wants them."""
    num, block_size, kv_heads, _, head_dim = pages.shape
    apart = tpu.num_apart(kv_heads, tpu.padded_head_dim(head_dim))
    apart_first = pages.reshape(num, block_size, apart, -1, 2, head_dim).swapaxes(1, 2)
    wide = jnp.pad(apart_first, [(0, 0)] * 5 + [(0, tpu.padded_head_dim(head_dim) - head_dim)])
    return wide.reshape(num, block_size, kv_heads, 2, -1)


@pytest.mark.parametrize(
    ("mask", "softcap"),
    [
        (Mask(), 1.5),
        (Mask(window=20, attention_chunk=32), None),
        pytest.param(Mask(window=20), None, marks=pytest.mark.slow),
    ],
)
def test_decodes_and_prefills(model: Model, mask: Mask, softcap: float | None) -> None:
    check(model, ragged(DECODES, CHUNKS, padding=(13, 3)), mask, softcap)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "apart"),
    [
        (6, 16, 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 256, 2), (3, 16, 3), (8, 16, 1), (1, 256, 1))
        ),
    ],
)
def test_heads_that_the_kernel_cannot_read_together(
    model: Model, kv_heads: int, head_dim: int, apart: int
) -> None:
    heads = {"kv_heads": kv_heads, "head_dim": head_dim, "group": 2}
    check(model, ragged(DECODES[:2], CHUNKS[:2], padding=(4, 2), **heads), Mask(window=20))
    seen = {pages.shape[2] for (_, pages, *_), _ in model.calls}
    assert seen == {2 * kv_heads // apart}, "keys and values of as many heads"


def test_only_decodes(model: Model) -> None:
    check(model, ragged(DECODES, [], padding=(1, 1)), Mask(attention_chunk=16))


@pytest.mark.parametrize("mask", [Mask(), Mask(attention_chunk=16)])
def test_only_prefills_with_padding_that_claims_to_be_of_the_first(model: Model, mask: Mask) -> None:
    check(model, ragged([], [(20, 30)], padding=(14, 2)), mask)


def test_prefill_without_padding(model: Model) -> None:
    check(model, ragged([], [(0, 16), (16, 16)]), Mask(attention_chunk=16))


def test_nothing_but_padding(model: Model) -> None:
    """As at the start, when every program is run once."""
    shape = StepShape(10, 4, 2)
    parts = parts_of(jnp.zeros(shape.packed_size, jnp.int32), shape)
    batch = batch_of(parts, jnp.zeros((4, 2), jnp.int32), shape)
    q, kv = jnp.ones((10, 1, 2, 16)), jnp.ones((10, 1, 16))
    check(model, (q, kv, kv, jnp.zeros((3, 8, 1, 2, 16)), batch), Mask(attention_chunk=8))


@pytest.mark.parametrize("mask", [Mask(), Mask(window=20), Mask(attention_chunk=16)])
def test_a_step_for_chunks_that_has_none(model: Model, mask: Mask) -> None:
    q, k, v, pages, batch = ragged([3, 40, 17, 8, 64, 31, 90, 2, 11], [], padding=(7, 2))
    check(model, (q, k, v, pages, replace(batch, max_chunks=2)), mask)


def test_blocks_larger_than_the_kernels_pages(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "MOST_KEYS_OF_A_PAGE", 8)
    check(model, ragged([90], [(60, 9)], block_size=32), Mask(window=20))


def test_tables_too_large_for_one_call(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "TABLE_BYTES", 3 * 4 * tpu.LANES)
    check(model, ragged(DECODES, []), Mask())
    assert [len(tables) for (_, _, _, tables, _, _), _ in model.calls] == [3, 1]


@pytest.mark.parametrize("mask", [Mask(window=20), Mask(attention_chunk=32)])
def test_blocks_that_nobody_sees_are_not_read(model: Model, mask: Mask) -> None:
    """They are not numbers, which even a weight of 0 would spread."""
    q, k, v, pages, batch = ragged([90], [(70, 20)])
    unseen = jnp.concatenate([batch.tables[0, :8], batch.tables[1, :6]])
    arguments = q, k, v, as_held(pages.at[unseen].set(jnp.nan)), batch
    out, _ = model.run(arguments, Options(mask, 0.25, None))
    assert np.isfinite(np.asarray(out)).all()


class Loaded:
    """Pages that the kernel has waited for; loads of its reshaped reference cannot be interpreted."""

    def __init__(self, ref: Any, *shape: int) -> None:
        self._ref, self.dtype, self._shape = ref, ref.dtype, shape

    def reshape(self, *shape: int) -> Loaded:
        return Loaded(self._ref, *shape)

    def __getitem__(self, index: Any) -> jax.Array:
        return self._ref[...].reshape(self._shape)[index]


class Copies(bundled_kernel.MultiPageAsyncCopyDescriptor):  # type: ignore[misc]
    def wait(self) -> Loaded:
        return Loaded(super().wait())


@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        ([20, 3], []),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (DECODES, CHUNKS),
                ([5, 17, 30, 2, 44, 61, 8, 12, 13, 90], CHUNKS[:2]),  # decodes fill more than a block of rows
                ([], CHUNKS),
            )
        ),
    ],
)
def test_sinks(monkeypatch: pytest.MonkeyPatch, decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    """The kernel itself, with stretches of keys and blocks of rows that a sequence has several of."""
    monkeypatch.setattr(bundled_kernel, "MultiPageAsyncCopyDescriptor", Copies)
    monkeypatch.setattr(tpu, "MOST_PAGES", 2)
    monkeypatch.setattr(tpu, "PREFILL_ROWS", 8)  # not more than the group has, for the interpreter
    arguments = q, k, v, pages, batch = ragged(decodes, chunks, padding=(3, 1), group=8)
    sinks = jnp.linspace(-3, 4, q[0, ..., 0].size).reshape(q.shape[1:3])
    options = Options(Mask(window=12), 0.25, None, sinks)
    with pltpu.force_tpu_interpret_mode():
        out, _ = hasty(partial(tpu.paged_attention, options=options), q, k, v, as_held(pages), batch)
    expected, _ = hasty(partial(reference.paged_attention, options=options), *arguments)
    real = np.asarray(batch.kv_slots) > 0
    np.testing.assert_allclose(np.asarray(out)[real], np.asarray(expected)[real], atol=3e-5)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "mask", "softcap"),
    [
        (2, 8, 64, 32, Mask(window=128), None),  # gpt-oss-20b over 4 chips
        (2, 2, 256, 8, Mask(window=4096), 50.0),  # Gemma-2-9B over 4 chips
        (1, 8, 512, 32, Mask(), None),  # Gemma-4-31B over 4 chips, layers without a window
        (8, 4, 128, 2048, Mask(), None),  # a block of several pages
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 4, 128, 32, Mask(), None),  # Llama-3.1-8B over 4 chips
                (1, 5, 128, 16, Mask(attention_chunk=8192), None),  # an odd group
                (3, 3, 64, 32, Mask(), None),  # SmolLM2-135M
                (32, 1, 96, 32, Mask(window=2047), None),  # Phi-3-mini
            )
        ),
    ],
)
def test_the_kernel_lowers_for_tpus(
    kv_heads: int, group: int, head_dim: int, block_size: int, mask: Mask, softcap: float | None
) -> None:
    has_sinks = (group, head_dim) == (8, 64)
    assert tpu.can_attend(kv_heads, head_dim, block_size, [mask], has_sinks, jnp.bfloat16)
    shape = StepShape(80, 18, 2)
    sinks = jnp.ones((kv_heads, group)) if has_sinks else None

    def step(q: Any, k: Any, v: Any, pages: Any, tables: Any, packed: Any) -> tuple[jax.Array, jax.Array]:
        batch = batch_of(parts_of(packed, shape), tables, shape)
        return tpu.paged_attention(q, k, v, pages, batch, Options(mask, 0.1, softcap, sinks))

    described = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    kv = described((shape.num_tokens, kv_heads, head_dim))
    pages = described((64, block_size, kv_heads, 2, tpu.padded_head_dim(head_dim)))
    q = described((shape.num_tokens, kv_heads, group, head_dim))
    sizes = (shape.num_rows, max(16384 // block_size, 1)), (shape.packed_size,)
    tables, packed = (jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes)
    with jax.sharding.use_abstract_mesh(CHIP):
        exported = jax.export.export(jax.jit(step, donate_argnums=3), platforms=["tpu"])(
            q, kv, kv, pages, tables, packed
        )
    # Heads that lie apart call the same.
    assert exported.mlir_module().count("@tpu_custom_call") == 2, "one kernel for decodes, one for prefills"


def test_what_the_kernel_is_for() -> None:
    masks = [Mask(), Mask(window=5), Mask(attention_chunk=8192)]
    assert tpu.can_attend(2, 128, 32, masks, True, jnp.bfloat16)
    assert tpu.can_attend(3, 64, 32, [], False, jnp.bfloat16)
    assert not tpu.can_attend(3, 64, 32, [], True, jnp.bfloat16), "heads that lie apart"
    assert not tpu.can_attend(2, 128, 32, [Mask(attention_chunk=40)], False, jnp.bfloat16)
    assert not tpu.can_attend(2, 128, 32, [], False, jnp.float32)
    assert not tpu.can_attend(128, 128, 2048, [], False, jnp.bfloat16)
