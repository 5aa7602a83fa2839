"""Structured outputs: nothing hostile takes long, takes much or ends the process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from hex_llm.errors import InvalidRequest, QueueFull
from hex_llm.sampling_params import StructuredOutputs
from hex_llm.text import grammar
from hex_llm.text.grammar import (
    FOLLOW_SECONDS,
    FOLLOW_SECONDS_PER_TOKEN,
    MAX_SLOW,
    TRIAL_SECONDS,
    GrammarFactory,
    Matcher,
)
from tests.text.grammars import Setting


def chain(link: str, last: str, length: int) -> str:
    return "\n".join([*(link.replace("+", str(i + 1)).replace("@", str(i)) for i in range(length)), last])


def references(length: int) -> str:
    links: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


BOMBS = {
    **{f"regex {text[:20]}": {"regex": text} for text in (
        "(a+)+b", "(.*)*x", "(a|a)*b", ".{0,65535}{65535}", "(a{1,1000}){1,1000}{1,1000}", "(.*a){20}.*",
        "(a|b)*a(a|b){30}", "a?" * 5000 + "a" * 5000, "a" * 1_000_000, "[a-z]*" * 2000, "." * 300_000,
    )},
    "schema nested": {"json": nested(10_000)},
    "schema chained": {"json": references(8000)},  # overflows llguidance's stack
    "10k anyOf": {"json": json.dumps({"anyOf": [{"required": [f"k{i}"]} for i in range(10_000)]})},
    "maxItems": {"json": json.dumps({"type": "array", "minItems": 2**31, "maxItems": 2**31 + 1})},
    "maxLength": {"json": json.dumps({"type": "string", "minLength": 2**31})},
    "pattern": {"json": json.dumps({"type": "string", "pattern": "(a{1,999}){1,999}{1,999}"})},
    "patterns": {"json": json.dumps({"allOf": [{"pattern": f".*{i}.*"} for i in range(30)]})},  # for ever
    "big enum": {"json": json.dumps({"enum": [f"v{i}" for i in range(80_000)]})},
    "many properties": {"json": json.dumps({"properties": {f"p{i}": {} for i in range(20_000)}})},
    "multipleOf": {"json": json.dumps({"type": "integer", "multipleOf": 999_999_937})},
    "rules chained": {"grammar": chain("r@: r+", 'start: r0\nr9999: "a"', 9999)},
    "terminals chained": {"grammar": chain("R@: R+", 'start: R0\nR9999: "a"', 9999)},
    "terminals doubled": {"grammar": chain("R@: R+ R+", 'start: R0\nR60: "a"', 60)},
    "90k alternatives": {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(90_000))},  # quadratic
    "ambiguous": {"grammar": 'start: a\na: a a a | "x" | '},
    "optional": {"grammar": 'start: "x"' + ' "b"?' * 20_000},
    "left recursion": {"grammar": 'start: start "a" | "b"'},
    "parentheses": {"grammar": "start: " + "(" * 100_000},
    "EBNF chained": {"grammar": chain("r@ ::= r+", 'root ::= r0\nr9999 ::= "a"', 9999)},
}  # fmt: skip


# They end as others do, by the limit of a trial, all of which they take.
SELDOM = ("regex a?a?", "big enum", "many properties", "90k alternatives", "optional")


def follow(setting: Setting, matcher: Matcher, most: int = 60) -> None:
    rng = random.Random(0)
    for _ in range(most):
        bits = setting.allowed(matcher)
        if matcher.stopped:
            return
        bits[list(setting.eos_ids)] = False
        if not bits.any():
            return
        assert matcher.accept(int(rng.choice(np.flatnonzero(bits))))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith(SELDOM)) for name in BOMBS]
)
def test_hostile_ones_are_bounded(default: Setting, name: str) -> None:
    default.compile(regex="a")  # the process is there
    process, memory = default.factory.quick.process, psutil.Process().memory_info().rss
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(default.compile, **BOMBS[name])
        longest = longest_wait(compiling.done)
    assert time.monotonic() - begin < 25
    assert longest < 0.5  # other threads run meanwhile
    try:
        matcher = compiling.result()
        begin = time.monotonic()
        follow(default, matcher)
    except InvalidRequest:  # as it may be
        pass
    assert time.monotonic() - begin < 25
    assert psutil.Process().memory_info().rss - memory < 150 << 20
    assert default.factory.quick.process is process  # only its child has died
    assert default.compile(choice=("x",)).accept(default.id_of("x"))


def longest_wait(done: Callable[[], bool]) -> float:
    longest, last = 0.0, time.monotonic()
    while not done():
        time.sleep(0.002)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    return longest


AMBIGUOUS = "start: s\ns: " + " | ".join(f"s /[a-z]{{{i},}}/" for i in range(1, 200)) + ' | "x"'


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "((a{0,100}b{0,100}){0,100}c{0,100}){0,100}"},  # llguidance gives up
        {"grammar": AMBIGUOUS},  # we do
    ],
    ids=["fuel", "time"],
)
def test_what_gets_too_complex_later_ends_its_request_only(
    default: Setting, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "FOLLOW_SECONDS_PER_TOKEN", 0)  # a fast machine would keep up with it
    matcher = default.compile(**wanted)
    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match="too complex to be followed further") as refused:
        follow(default, matcher, 1000)
    assert refused.value.param == "structured_outputs"
    assert not matcher.stopped
    assert time.thread_time() - begin < 10
    with pytest.raises(InvalidRequest):
        matcher.mask()


@pytest.mark.slow
def test_nothing_else_is_kept_of_what_is_done(default: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "KEPT_BYTES", 1 << 20)

    def compile_some(first: int, count: int) -> None:
        for i in range(first, first + count):
            schema = {"type": "object", "properties": {f"k{i}": {"minimum": i}}, "required": [f"k{i}"]}
            default.compile(json=json.dumps(schema)).mask()

    compile_some(0, 20)
    assert default.factory.quick.process is not None
    processes = [psutil.Process(), psutil.Process(default.factory.quick.process.pid)]
    before = [process.memory_info().rss for process in processes]
    compile_some(1000, 100)
    for process, start in zip(processes, before, strict=True):
        assert process.memory_info().rss - start < 8 << 20


def unique_bomb(i: int) -> StructuredOutputs:
    return StructuredOutputs(json=json.dumps({"allOf": [{"pattern": f".*{i}x{j}.*"} for j in range(30)]}))


def test_a_flood_of_bad_ones_delays_a_good_one_by_no_more_than_one_trial(default: Setting) -> None:
    default.compile(regex="a")  # the process is there
    flood = [default.factory.submit(unique_bomb(i)) for i in range(MAX_SLOW + 3)]
    begin = time.monotonic()
    default.compile(choice=("good",))
    assert time.monotonic() - begin < len(flood) * TRIAL_SECONDS  # on a busy machine; alone it takes 0.8 s
    assert not all(one.done() for one in flood)
    refused = [one.exception(300) for one in flood]
    assert {type(error) for error in refused} == {InvalidRequest, QueueFull}
    assert default.factory.num_slow == 0


def test_who_leaves_costs_no_trial(default: Setting) -> None:
    default.compile(regex="a")
    flood = [default.factory.submit(unique_bomb(100 + i)) for i in range(50)]
    for one in flood:
        one.cancel()
    begin = time.monotonic()
    default.compile(choice=("after them",))
    assert time.monotonic() - begin < 10  # one had begun


def test_what_was_compiled_or_refused_is_not_tried_again(
    default: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = {"choice": ("kept",)}, {"regex": "(kept"}
    first = default.compile(**good)
    with pytest.raises(InvalidRequest) as refusal:
        default.compile(**bad)

    def fail(_: StructuredOutputs) -> None:
        raise AssertionError("it is tried again")

    monkeypatch.setattr(default.factory.quick, "ask", fail)
    again = default.compile(**good)
    assert (again.mask() == first.mask()).all()
    assert again.budget is not first.budget
    with pytest.raises(InvalidRequest, match=re.escape(str(refusal.value))):
        default.compile(**bad)
    monkeypatch.setattr(grammar, "REFUSED_S", 0.0)


def test_those_who_ask_at_once_share_one_trial(default: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, plain = list[StructuredOutputs](), default.factory.quick.ask

    def ask(wanted: StructuredOutputs) -> Any:
        asked.append(wanted)
        return plain(wanted)

    monkeypatch.setattr(default.factory.quick, "ask", ask)
    wanted = StructuredOutputs(choice=("shared", "by many"))
    made = [one.result(10) for one in [default.factory.submit(wanted) for _ in range(100)]]
    assert asked == [wanted]
    assert len({id(matcher) for matcher in made}) == 100


def test_what_is_kept_is_bounded_in_bytes(default: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    factory = GrammarFactory(default.tokenizer, default.vocab_size, default.eos_ids)
    monkeypatch.setattr(grammar, "KEPT_BYTES", 5 << 20)
    for i in range(60):
        factory.submit(StructuredOutputs(choice=(f"word {i}",))).result()
        assert factory.num_bytes <= 5 << 20
    assert 1 < len(factory.entries) < 60
    assert factory.num_bytes == sum(entry.num_bytes for entry in factory.entries.values())
    factory.close()


@pytest.mark.slow
def test_the_choices_of_a_request_share_its_time(default: Setting) -> None:
    first = default.compile(grammar=AMBIGUOUS)
    copies, num_followed = [first.copy() for _ in range(16)], 0

    def follow_all() -> None:
        nonlocal num_followed
        for _ in range(60):
            for matcher in copies:
                follow(default, matcher, 1)
                num_followed += 1

    begin = time.thread_time()
    with pytest.raises(InvalidRequest, match="too complex to be followed further"):
        follow_all()
    allowed = FOLLOW_SECONDS + num_followed * FOLLOW_SECONDS_PER_TOKEN
    assert time.thread_time() - begin < 2 * allowed, "not so long for each of them"
    for matcher in copies:
        with pytest.raises(InvalidRequest):
            matcher.accept(default.id_of("a"))


# ---- the process


def test_threads_may_compile_at_once(default: Setting) -> None:
    def check(i: int) -> bool:
        matcher = default.compile(choice=(f"x{i}",))
        ids = default.tokenizer.encode(f"x{i}", add_special_tokens=False)
        return all(matcher.accept(token_id) for token_id in ids) and matcher.stopped

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, range(40)))


def test_a_process_that_was_killed_is_started_again(default: Setting) -> None:
    default.compile(regex="a")
    assert default.factory.quick.process is not None
    os.kill(default.factory.quick.process.pid, signal.SIGKILL)
    assert default.compile(regex="a").accept(default.id_of("a"))


def test_close_leaves_nothing_behind(default: Setting) -> None:
    num_threads, num_fds = threading.active_count(), psutil.Process().num_fds()
    factory = GrammarFactory(default.tokenizer, default.vocab_size, default.eos_ids)
    factory.submit(StructuredOutputs(regex="a")).result()
    process = factory.quick.process
    assert process is not None
    factory.close()
    factory.close()
    assert not psutil.pid_exists(process.pid)
    assert (threading.active_count(), psutil.Process().num_fds()) == (num_threads, num_fds)
