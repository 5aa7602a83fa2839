"""Greedy tokens do not depend on batching, chunking, the prefix cache, block sizes, preemption or overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.driving import make_engine
from tests.engine.equality import (
    ALL_CASES,
    BATCHES,
    BLOCK_SIZES,
    CHUNKS,
    FAST_NAMES,
    MODELS,
    QUANTIZED,
    Case,
    Engines,
    Judged,
    judged_alone,
    judged_default,
    judged_quantized,
    judged_tiny,
    make_prompts,
    run_case,
    some_cases,
)
from tests.tiny import Tiny


def check(name: str, judged: Judged, cases: list[Case]) -> None:
    engines = Engines(judged.folder)
    compared = sum(run_case(judged, case, engines.engine(case)) for case in cases)
    print(f"{name}: {len(cases)} cases, {compared} tokens compared, all equal")


@pytest.mark.parametrize(("name", "cases"), some_cases().items(), ids=FAST_NAMES)
def test_some_of_the_matrix(name: str, cases: list[Case], tmp_path: Path) -> None:
    check(name, judged_tiny(next(tiny for tiny in MODELS if tiny.name == name), tmp_path), cases)


@pytest.mark.slow  # tests/kernels/test_cpu_quantized.py has the rows of products one by one
def test_some_of_the_matrix_of_a_quantized_model(tmp_path: Path) -> None:
    check("awq-64", judged_quantized("awq-64", tmp_path), [Case(7, 33, 8, True, 2, True)])


@pytest.mark.parametrize(
    ("kv_cache_dtype", "case"),
    [
        ("int8", Case(7, 33, 8, True, 2, True)),
        pytest.param("fp8", Case(32, 40, 16, True, 5, True), marks=pytest.mark.slow),
    ],
)
def test_some_of_the_matrix_with_pages_of_8_bits(kv_cache_dtype: str, case: Case, tmp_path: Path) -> None:
    prompts = make_prompts(MODELS[0].save(tmp_path).config.vocab_size, first=3)
    judged = judged_alone(Judged(tmp_path, prompts, []), case.batch, kv_cache_dtype=kv_cache_dtype)
    engine = Engines(tmp_path, kv_cache_dtype=kv_cache_dtype).engine(case)
    run_case(judged, case, engine)
    dtype = engine.stepper.runner.pages[0].dtype
    assert dtype.itemsize == 1
    assert engine.stepper.scheduler.pool.kv_dtype == str(dtype), "blocks are found by it"


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("tiny", MODELS, ids=lambda t: t.name)
def test_the_whole_matrix(tiny: Tiny, block_size: int, chunk: int | None, tmp_path: Path) -> None:
    cases = [case for case in ALL_CASES if (case.block_size, case.chunk) == (block_size, chunk)]
    check(tiny.name, judged_tiny(tiny, tmp_path), cases)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_whole_matrix_of_quantized_models(name: str, block_size: int, tmp_path: Path) -> None:
    check(
        name, judged_quantized(name, tmp_path), [case for case in ALL_CASES if case.block_size == block_size]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("gemma2-2b", 2), ("mixtral-8x7b", 4)])
def test_the_matrix_over_devices(name: str, size: int, tmp_path: Path) -> None:
    judged = judged_tiny(next(tiny for tiny in MODELS if tiny.name == name), tmp_path)
    engines = Engines(judged.folder, tensor_parallel_size=size)
    for case in ALL_CASES:
        if case.block_size != 16 and case.chunk in (None, 33) and case.preemptions in (0, 3):
            run_case(judged, case, engines.engine(case))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{"disagg_topo": "1,1"}, {"disagg_topo": "1,2", "tensor_parallel_size": 2}])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("chunk", [None, 33])
def test_the_matrix_with_prefill_and_decode_apart(
    chunk: int | None, caching: bool, flags: dict[str, Any], tmp_path: Path
) -> None:
    """Without forced preemptions, which are of one scheduler."""
    judged = judged_tiny(MODELS[0], tmp_path)
    case = Case(1, chunk, 8, caching, 0, overlapped=True)
    engine = make_engine(tmp_path, **case.flags(), **flags)
    for batch in BATCHES:
        run_case(judged, case._replace(batch=batch), engine)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_whole_matrix_of_the_default_model(block_size: int, chunk: int | None) -> None:
    cases = [case for case in ALL_CASES if (case.block_size, case.chunk) == (block_size, chunk)]
    check("SmolLM2", judged_default(), cases)
