"""The matrix of greedy equality: a request gets the same tokens however it is served.

A case serves a batch of prompts in one way; the judge is transformers' greedy search, each prompt alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import transformers

from hex_llm.engine.engine import Engine
from hex_llm.engine.loading import build_engine, open_files
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import Request
from tests.engine.driving import drive, fresh_engine, make_config, tokens
from tests.models.test_quantized import BY_NAME, LLAMA, quantize
from tests.tiny import FAMILIES, Tiny, default_model, greedy_tokens

NUM_OUT = 12
MAX_LEN = 96
BATCHES = (1, 7, 32)
CHUNKS = (None, 33, 40, 64)  # tokens in a step; None: chunked prefill is off
PREFILLED = 60  # tokens in a step then: fewer than the longest prompts have
BLOCK_SIZES = (8, 16, 32)
NAMES = ("llama3", "gemma2-2b", "mixtral-8x7b", "qwen2-tied", "phi3-mini-128k-growing")
# To the engine those left out are like llama3; they are among all cases, in `make test-all`.
FAST_NAMES = tuple(name for name in NAMES if name in ("llama3", "phi3-mini-128k-growing"))
MODELS = [tiny for tiny in FAMILIES if tiny.name in NAMES]
QUANTIZED = ("awq-64", "fbgemm-fp8")


class Case(NamedTuple):
    batch: int
    chunk: int | None
    block_size: int
    caching: bool  # every prompt is served twice: the second time it is found in the prefix cache
    preemptions: int  # forced on each sequence, at random steps
    overlapped: bool

    def flags(self) -> dict[str, Any]:
        return {
            "enable_chunked_prefill": self.chunk is not None,
            "max_num_batched_tokens": self.chunk or PREFILLED,
            "block_size": self.block_size,
            "num_blocks": 32 * MAX_LEN // self.block_size,
            "enable_prefix_cache_hbm": self.caching,
            "prefix_cache_unit": "block",
            "async_scheduling": self.overlapped,
            "max_decode_seqs": 32,
            "decode_seqs_padding": 32,
            "max_prefill_seqs": 4,
            "max_model_len": MAX_LEN,
        }


ALL_CASES = [
    Case(batch, chunk, block_size, caching, preemptions, overlapped)
    for block_size in BLOCK_SIZES
    for chunk in CHUNKS
    for batch in BATCHES
    for caching in (False, True)
    for preemptions in range(6)
    for overlapped in (False, True)
]


def some_cases() -> dict[str, list[Case]]:
    """For each model some: every pair of values of two dimensions, the model being one, occurs somewhere. The
    second model has blocks of one size."""
    few = [
        case
        for case in ALL_CASES
        if case.chunk in (None, 33) and case.preemptions in (0, 2, 5) and case.block_size != 16
    ]
    everything = [
        (name, *case) for name in FAST_NAMES for case in few if name == "llama3" or case.block_size == 8
    ]
    missing = {pair for one in everything for pair in _pairs(one)}
    chosen: dict[str, list[Case]] = {name: [] for name in FAST_NAMES}
    while missing:
        best = max(everything, key=lambda one: len(missing & _pairs(one)))
        missing -= _pairs(best)
        chosen[best[0]].append(Case(*best[1:]))
    return chosen


def _pairs(values: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
    return {(i, a, j, b) for j, b in enumerate(values) for i, a in enumerate(values[:j])}


@dataclass
class Judged:
    """A model with prompts and the tokens that follow them."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def prompt_lengths() -> list[int]:
    """At the borders of blocks and next to them, for all block sizes."""
    borders = (8, 16, 24, 32, 48, 64)
    return [border + i for border in borders for i in (-1, 0, 1)] + list(range(2, 30, 2))


def make_prompts(vocab_size: int, first: int = 0) -> list[list[int]]:
    """32 of them; half begin like another one."""
    generator = random.Random(1)
    common = [generator.randrange(first, vocab_size) for _ in range(MAX_LEN)]
    prompts = []
    for i, length in enumerate(prompt_lengths()[:32]):
        own = [generator.randrange(first, vocab_size) for _ in range(length)]
        prompts.append(common[: length - 1] + own[-1:] if i % 2 else own)
    return prompts


def run_case(judged: Judged, case: Case, engine: Engine) -> int:
    """The number of tokens compared; an AssertionError tells the first that differs."""
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    numbers = list(range(32))[: case.batch] if case.batch > 1 else [17]
    compared = 0
    for again in range(1 + case.caching):
        requests = [Request(f"{i}", judged.prompts[i], params) for i in numbers]
        updates = drive(engine, requests, forced_preemptions(engine, case.preemptions))
        for i in numbers:
            told = updates[str(i), 0]
            assert tokens(told) == judged.expected[i], f"{case}, prompt {i}, again {again}"
            size, length = case.block_size, len(judged.prompts[i])
            if again:
                shared = length <= (engine.spec.uniform_len or length)
                assert told[0].num_cached == shared * ((length - 1) // size * size), f"{case}, prompt {i}"
                if shared:
                    assert told[0].num_published == length // size * size, f"{case}, prompt {i}"
            compared += NUM_OUT
    return compared


def forced_preemptions(engine: Engine, each: int) -> Any:
    """Preempts every sequence so many times, at random steps; steps in flight must be read before."""
    generator = random.Random(each)
    done: dict[str, int] = {}

    def between(_: int) -> None:
        for sequence in list(engine.stepper.scheduler.running):
            if done.get(sequence.request_id, 0) < each and generator.random() < 0.3:
                while engine.stepper.is_in_flight:
                    engine.stepper.read_next(engine.book)
                if sequence.finish_reason is None and sequence.slot:
                    engine.stepper.scheduler.preempt(sequence)
                    done[sequence.request_id] = done.get(sequence.request_id, 0) + 1

    return between


def judged_tiny(tiny: Tiny, folder: Path) -> Judged:
    model = tiny.save(folder)
    prompts = make_prompts(model.config.get_text_config().vocab_size, first=3)
    return Judged(folder, prompts, [greedy_tokens(model, prompt, NUM_OUT) for prompt in prompts])


def judged_quantized(name: str, folder: Path) -> Judged:
    """A tiny Llama in one of tests/weights/packers.py's formats; the judge has the expanded weights."""
    LLAMA.save(folder / "model")
    expanded = quantize(folder / "model", BY_NAME[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(expanded, attn_implementation="eager")
    prompts = make_prompts(model.config.vocab_size, first=3)
    expected = [greedy_tokens(model, prompt, NUM_OUT) for prompt in prompts]
    return Judged(folder / "model", prompts, expected)


def judged_default() -> Judged:
    """SmolLM2, from its GGUF file."""
    path, model = default_model()
    prompts = make_prompts(40_000, first=1000)
    return Judged(path, prompts, [greedy_tokens(model, prompt, NUM_OUT) for prompt in prompts])


def judged_alone(judged: Judged, num: int, **flags: Any) -> Judged:
    """The first prompts by ourselves with these flags, each alone: for what others do not compute."""
    case = Case(1, None, 32, caching=False, preemptions=0, overlapped=False)
    engine = Engines(judged.folder, **flags).engine(case)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    expected = [tokens(drive(engine, [Request("0", judged.prompts[i], params)])["0", 0]) for i in range(num)]
    return Judged(judged.folder, judged.prompts, expected)


class Engines:
    """One set of weights and programs for each set of flags that changes programs; the rest is always new."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        """`flags` are given besides those of a case."""
        self.folder, self.flags = folder, flags
        self.first: dict[Any, Engine] = {}

    def engine(self, case: Case) -> Engine:
        config = make_config(self.folder, **case.flags(), **self.flags)
        key = (case.block_size, case.chunk)
        if key not in self.first:
            self.first[key] = build_engine(config, open_files(config), None)
        first = self.first[key]
        return fresh_engine(first, config=config)
