"""Prefills that cuDNN begins and our kernel continues: cuDNN's part in plain JAX, ours interpreted."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from hex_llm.kernels import gpu, gpu_cudnn, reference
from hex_llm.kernels.attention import Mask, Options
from hex_llm.kernels.gpu_kernel import Tiling
from tests.kernels.lowering import lowered_for_gpus
from tests.kernels.test_gpu import check, ragged, run


def plain_causal(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, *, window: int | None, scale: float
) -> tuple[jax.Array, jax.Array]:
    """As gpu_cudnn.causal; not a number is what it leaves undefined."""
    num_rows, num_seqs, place = len(q), len(lengths), jnp.arange(len(q))
    ends = jnp.cumsum(lengths)
    owner = jnp.searchsorted(ends, place, side="right")
    ago = place[:, None] - place
    visible = (owner[:, None] == owner) & (ago >= 0) & (ago < (window or num_rows))
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    scores = jnp.einsum("tkgh,skh->kgts", *exact[:2], precision="highest") * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    out = jnp.einsum("kgts,skh->tkgh", jax.nn.softmax(scores), exact[2], precision="highest")
    logs = jax.nn.logsumexp(scores, axis=-1).reshape(-1, num_rows)
    nth = place - (ends - lengths)[owner]
    undefined = jnp.full((num_seqs, len(logs), num_rows), jnp.nan)
    real = owner < num_seqs
    placed = undefined.at[owner, :, nth].set(logs.T, mode="drop")
    return jnp.where(real[:, None, None, None], out, jnp.nan).astype(q.dtype), placed


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The windows of layers that cuDNN's stand-in was asked for."""
    windows = []

    def causal(*arrays: Any, window: int | None, scale: float) -> Any:
        windows.append(window)
        return plain_causal(*arrays, window=window, scale=scale)

    monkeypatch.setattr(gpu_cudnn, "causal", causal)
    monkeypatch.setattr(gpu_cudnn, "can_attend", lambda *_: True)
    monkeypatch.setattr(gpu, "MIN_CUDNN_ROWS", 1)
    monkeypatch.setattr(gpu, "MAX_CUDNN_CHUNKS", 3)  # fewer than there are
    return windows


RAGGED = [(0, 50), (100, 40), (0, 1), (290, 3), (64, 1)]  # (cached, new tokens)


@pytest.mark.parametrize(
    ("decodes", "chunks", "mask", "group", "head_dim", "block_size"),
    [
        ([0, 299], RAGGED, Mask(window=70), 4, 16, 32),
        pytest.param([], RAGGED, Mask(), 1, 64, 16, marks=pytest.mark.slow),
        pytest.param([5, 70], [(130, 60)], Mask(), 7, 96, 2048, marks=pytest.mark.slow),
        pytest.param([], [(0, 33), (0, 70)], Mask(window=5), 4, 16, 16, marks=pytest.mark.slow),
        pytest.param([3], [(0, 40)], Mask(), 4, 16, 8, marks=pytest.mark.slow),
    ],
)
def test_beside_the_reference(
    decodes: list[int],
    chunks: list[tuple[int, int]],
    mask: Mask,
    group: int,
    head_dim: int,
    block_size: int,
    begun: list[int | None],
) -> None:
    sizes = {"group": group, "head_dim": head_dim, "block_size": block_size, "dtype": jnp.bfloat16}
    kv_dtype = jnp.int8 if block_size == 32 else None
    check(ragged(decodes, chunks, kv_heads=2, kv_dtype=kv_dtype, **sizes), mask)
    assert begun == [mask.window]


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 90])
def test_exactly(
    begun: list[int | None], splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where nothing hides behind rounding, with keys in one split and in several."""
    q, k, v, pages, batch = ragged([300, 7], RAGGED, kv_heads=2, group=3, num_padding=0)
    num_blocks = len(q) // 10 + batch.max_chunks + 1
    spare = (splits - 1) * num_blocks
    tiling = Tiling(32, 16, 10, num_blocks, spare, min_split=32, warps=4, stages=2)
    monkeypatch.setattr(gpu, "cudnn_begins", lambda *_: True)
    monkeypatch.setattr(gpu, "prefill_tiling", lambda *_: tiling)
    options = Options(Mask(window), 0.25, None)
    out, _ = run(gpu.paged_attention, (q, k, v, pages, batch), options=options)
    assert begun == [window]
    with jax.default_matmul_precision("highest"):
        plain = partial(reference.paged_attention, options=options)
        expected, _ = run(plain, (q, k, v, pages, batch))
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("most", [3, 12])
def test_padding_becomes_zero_and_sequences_without_rows_do_no_harm(
    most: int, begun: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MAX_CUDNN_CHUNKS", most)
    q, k, v, pages, batch = ragged([], [(20, 30), (0, 5)], num_padding=82, dtype=jnp.bfloat16)
    assert batch.max_chunks == 5
    options = Options(Mask(), 0.25, None)
    out, _ = run(gpu.paged_attention, (q, k, v, pages, batch), options=options)
    expected, _ = run(reference.paged_attention, (q, k, v, pages, batch), options=options)
    got, reference_out = (np.asarray(x.astype(jnp.float32)) for x in (out, expected))
    np.testing.assert_allclose(got[:35], reference_out[:35], atol=2e-2, rtol=2e-2)
    assert not got[35:].any()


@pytest.mark.parametrize(
    ("num_rows", "dtype", "mask", "softcap", "begins"),
    [
        (gpu.MIN_CUDNN_ROWS, jnp.bfloat16, Mask(window=5), None, True),
        (gpu.MIN_CUDNN_ROWS - 1, jnp.bfloat16, Mask(), None, False),
        (gpu.MIN_CUDNN_ROWS, jnp.float32, Mask(), None, False),
        (gpu.MIN_CUDNN_ROWS, jnp.bfloat16, Mask(attention_chunk=64), None, False),
        (gpu.MIN_CUDNN_ROWS, jnp.bfloat16, Mask(), 30.0, False),
    ],
)
def test_what_cudnn_is_for(
    num_rows: int,
    dtype: Any,
    mask: Mask,
    softcap: float | None,
    begins: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_cudnn, "can_attend", lambda *_: True)
    q = jnp.zeros((num_rows, 1, 1, 16), dtype)
    assert gpu.cudnn_begins(q, Options(mask, 0.25, softcap)) == begins


def test_without_a_gpu_there_is_no_cudnn() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("there is one")
    assert not gpu_cudnn.can_attend(8, 4, 128, None)


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_lowers_for_gpus(num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuDNN is asked for, and that the kernel that goes on becomes Triton's language."""
    if jax.default_backend() != "cpu":
        pytest.skip("it runs here")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(gpu_cudnn, "can_attend", lambda *_: True)
    monkeypatch.setattr(gpu, "MIN_CUDNN_ROWS", 1)
    arguments = ragged(
        [9], [(64, 40)] * num_seqs, dtype=jnp.bfloat16, group=4, head_dim=64, max_chunks=num_seqs
    )

    def attend(*arguments: Any) -> Any:
        return gpu.paged_attention(*arguments, Options(Mask(window=300), 0.1, None))

    lowered = lowered_for_gpus(attend, *arguments)
    assert lowered.count("triton") >= 3  # the write, decodes, prefills
    assert "PADDING_CAUSAL" in lowered
    assert "\\22sliding_window_length\\22: 300" in lowered
    assert f"\\22max_seg_per_batch\\22: {num_seqs + 1}" in lowered, "decodes are one"
