"""Greedy tokens do not depend on batching, chunking, the prefix cache, block sizes, preemption or overlap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.equality import (
    ALL_CASES,
    BLOCK_SIZES,
    CHUNKS,
    FAST_NAMES,
    MODELS,
    Case,
    Engines,
    judged_default,
    judged_tiny,
    run_case,
    some_cases,
)
from tests.tiny import Tiny


def check(tiny: Tiny, folder: Path, cases: list[Case]) -> None:
    judged, engines = judged_tiny(tiny, folder), Engines(folder)
    compared = sum(run_case(judged, case, engines.engine(case)) for case in cases)
    print(f"{tiny.name}: {len(cases)} cases, {compared} tokens compared, all equal")


@pytest.mark.parametrize(("name", "cases"), some_cases().items(), ids=FAST_NAMES)
def test_some_of_the_matrix(name: str, cases: list[Case], tmp_path: Path) -> None:
    check(next(tiny for tiny in MODELS if tiny.name == name), tmp_path, cases)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("tiny", MODELS, ids=lambda t: t.name)
def test_the_whole_matrix(tiny: Tiny, block_size: int, chunk: int | None, tmp_path: Path) -> None:
    cases = [case for case in ALL_CASES if (case.block_size, case.chunk) == (block_size, chunk)]
    check(tiny, tmp_path, cases)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_whole_matrix_of_the_default_model(block_size: int, chunk: int | None) -> None:
    judged = judged_default()
    engines = Engines(judged.folder)
    cases = [case for case in ALL_CASES if (case.block_size, case.chunk) == (block_size, chunk)]
    compared = sum(run_case(judged, case, engines.engine(case)) for case in cases)
    print(f"SmolLM2: {len(cases)} cases, {compared} tokens compared, all equal")
