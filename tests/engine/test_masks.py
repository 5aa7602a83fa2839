"""Grammars are followed beside the engine's thread: who waits for a mask holds up nobody else."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hex_llm.engine import book
from hex_llm.engine.engine import Engine
from hex_llm.engine.masks import MaskPool
from hex_llm.errors import InvalidRequest, QueueFull
from hex_llm.sampling_params import SamplingParams, StructuredOutputs
from hex_llm.text.grammar import Budget
from hex_llm.types import FinishReason
from tests.engine.driving import LLAMA, drive, make_engine, request, tokens

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
STRUCTURED = replace(GREEDY, max_tokens=3, structured_outputs=StructuredOutputs(json_object=True))


class Slow:
    """Allows token 5 and no other. Its masks, but the first, are made when `gate` is open."""

    stopped = False

    def __init__(self, gate: threading.Event) -> None:
        self.gate, self.budget, self.threads = gate, Budget(), set[str]()
        self.num_masks = 0

    def submit(self, _: StructuredOutputs) -> Future[Slow]:
        made: Future[Slow] = Future()
        made.set_result(self)
        return made

    def copy(self) -> Slow:
        return self

    def mask(self) -> np.ndarray:
        self.num_masks += 1
        if self.num_masks > 1:
            assert self.gate.wait(30)
            self.threads.add(threading.current_thread().name)
        words = np.zeros(4, np.int32)
        words[0] = 1 << 5
        return words

    def accept(self, token_id: int) -> bool:
        self.threads.add(threading.current_thread().name)
        return token_id == 5


def grammatical(folder: Path, grammars: Any, **flags: Any) -> Engine:
    return make_engine(folder, grammars, max_decode_seqs=4, max_model_len=64, **flags)


@pytest.mark.parametrize("overlapped", [True, False])
def test_who_waits_for_a_mask_sits_steps_out(folder: Path, overlapped: bool) -> None:
    gate = threading.Event()
    grammar = Slow(gate)
    engine = grammatical(folder, grammar, async_scheduling=overlapped)
    expected = tokens(drive(engine, [request("alone", LLAMA.prompt(), GREEDY)])["alone", 0])
    engine.add(request("structured", LLAMA.prompt(1), STRUCTURED))
    engine.add(request("other", LLAMA.prompt(), GREEDY))
    found = []
    while len(found) < 20:  # all of it, while the mask is being made
        found += [i for u in engine.step() if u.request_id == "other" for i in u.token_ids]
    assert found == expected
    gate.set()
    assert tokens(drive(engine)["structured", 0])[-2:] == [5, 5]
    assert grammar.threads == {"masks"}


def test_an_abort_does_not_wait_for_the_mask(folder: Path) -> None:
    gate = threading.Event()
    engine = grammatical(folder, Slow(gate))
    engine.add(request("structured", LLAMA.prompt(), STRUCTURED))
    while not engine.book.num_held:
        engine.step()
    engine.abort("structured")
    assert [u.finish_reason for u in engine.step()] == [FinishReason.ABORT]
    drive(engine)
    engine.check_idle()
    gate.set()


def test_a_grammar_that_waits_too_long_for_its_turn_is_turned_away(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting:
        def submit(self, _: StructuredOutputs) -> Future[Any]:
            return Future()

    monkeypatch.setattr(book, "GRAMMAR_S", 0.2)
    engine = grammatical(folder, Waiting())
    [end] = drive(engine, [request("r", LLAMA.prompt(), STRUCTURED)])["r", 0]
    assert (end.finish_reason, end.kind, end.param) == (FinishReason.ERROR, "QueueFull", None)


@pytest.mark.parametrize(
    "error", [QueueFull("full"), InvalidRequest("bad", "structured_outputs"), OSError("x")]
)
def test_a_grammar_that_is_not_made_ends_its_request_only(folder: Path, error: Exception) -> None:
    class Failing:
        def submit(self, _: StructuredOutputs) -> Future[Any]:
            made: Future[Any] = Future()
            made.set_exception(error)
            return made

    engine = grammatical(folder, Failing())
    ended = drive(
        engine, [request("r", LLAMA.prompt(), STRUCTURED), request("other", LLAMA.prompt(), GREEDY)]
    )
    end = ended["r", 0][-1]
    assert (end.kind, end.param) == (
        "QueueFull" if isinstance(error, QueueFull) else "",
        getattr(error, "param", None),
    )
    assert len(tokens(ended["other", 0])) == 20


def test_who_has_taken_the_least_time_goes_first() -> None:
    gate, order = threading.Event(), list[float]()

    class Noted(Slow):
        def accept(self, token_id: int) -> bool:
            order.append(self.budget.seconds_taken)
            return True

    pool = MaskPool(num_threads=1)
    first = Slow(gate)
    first.num_masks = 1
    jobs = [pool.submit(first, [5])]  # keeps the thread
    time.sleep(0.05)
    gates = threading.Event()
    gates.set()
    for taken in (0.5, 0.1, 0.9, 0.0):
        waiting = Noted(gates)
        waiting.budget = Budget(seconds_taken=taken)
        jobs.append(pool.submit(waiting, [5]))
    gate.set()
    for job in jobs:
        job.result(10)
    assert order == [0.0, 0.1, 0.5, 0.9]
