"""Adapters come, wait for slots, share them, change on the disk and fail, beside each other."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from hex_llm import LLM
from hex_llm import llm as llm_module
from hex_llm.admission import check_request
from hex_llm.config import EngineConfig
from hex_llm.engine import adapters, book
from hex_llm.engine.engine import Engine
from hex_llm.errors import InvalidRequest
from hex_llm.types import AdapterRef
from hex_llm.weights import adapter_source
from tests.adapted import NAMES, Judge, adapted_engine, adapted_request
from tests.engine.driving import LLAMA, drive, fresh_engine, tokens
from tests.tiny import Tiny

FILE = "adapter_config.json"


class Served(NamedTuple):
    engine: Engine
    judge: Judge
    folder: Path  # of the adapters NAMES


def serve(path: Path, **flags: Any) -> Served:
    judge = Judge(LLAMA.save(path / "model"))
    for i, name in enumerate(NAMES):
        judge.add(name, path, i)
    return Served(adapted_engine(path / "model", num_blocks=200, **flags), judge, path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """With two slots."""
    return serve(tmp_path_factory.mktemp("served"), max_loras=2, max_num_mem_cached_lora=1)


SAID: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}


def said(judge: Judge, name: str | None, prompt: list[int], num_tokens: int) -> list[int]:
    """As the judge does, who is slow."""
    key = name, tuple(prompt)
    if key not in SAID:
        SAID[key] = judge.tokens(name, prompt, 6)
    return SAID[key][:num_tokens]


def test_more_adapters_than_slots_take_turns(served: Served) -> None:
    """And what they leave in the prefix cache is their own: all have the same prompt."""
    engine, prompt = fresh_engine(served.engine), [*LLAMA.prompt(0), *LLAMA.prompt(1)]
    asked = [*NAMES, None, *NAMES, None]
    requests = [
        adapted_request(f"{i}", prompt, served.folder / name if name else None, max_tokens=6)
        for i, name in enumerate(asked)
    ]
    told = drive(engine, requests)
    for i, name in enumerate(asked):
        assert tokens(told[f"{i}", 0]) == said(served.judge, name, prompt, 6), f"{i} {name}"
    again = drive(engine, [adapted_request("a", prompt, served.folder / "a", max_tokens=6)])
    assert again["a", 0][0].num_cached > 0
    assert tokens(again["a", 0]) == said(served.judge, "a", prompt, 6)


def test_a_prompts_log_probabilities_are_the_adapters(served: Served) -> None:
    engine, prompt = fresh_engine(served.engine), LLAMA.prompt(0)
    logprobs = {}
    for name in ("a", None):  # a trains the head, too
        folder = served.folder / name if name else None
        told = drive(engine, [adapted_request("x", prompt, folder, max_tokens=1, prompt_logprobs=1)])
        logprobs[name] = [one.logprob for one in told["x", 0][0].prompt_logprobs]
        np.testing.assert_allclose(logprobs[name], served.judge.logprobs(name, prompt), atol=1e-3)
    assert logprobs["a"] != logprobs[None]


def test_one_that_fails_disturbs_nobody(served: Served, tmp_path: Path) -> None:
    engine, prompt = fresh_engine(served.engine), LLAMA.prompt(1)
    bad = {name: shutil.copytree(served.folder / "a", tmp_path / name) for name in ("cut", "rank")}
    weights = bad["cut"] / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    config = json.loads((bad["rank"] / "adapter_config.json").read_text())
    (bad["rank"] / "adapter_config.json").write_text(json.dumps({**config, "r": 5}))
    for name, changes in {"other": {"hidden_size": 64}, "deeper": {"num_hidden_layers": 3}}.items():
        bad[name] = Judge(Tiny(name, "LlamaForCausalLM", changes).build()).add(name, tmp_path, 0)
    words = {
        "cut": "broken or cut short",
        "rank": "says 5",
        "other": "is it for another model",
        "deeper": "no module that can be adapted here",
        "missing": "The model `missing` does not exist",
    }
    good = [adapted_request(name, prompt, served.folder / name, max_tokens=6) for name in ("a", "b")]
    asked = [adapted_request(name, prompt, bad.get(name, tmp_path / name)) for name in words]
    told = drive(engine, [*asked, *good])
    for name, message in words.items():
        [end] = told[name, 0]
        assert message in end.error, name
        assert (end.param, end.kind) == ("model", "UnknownModel" if name == "missing" else "")
        assert str(tmp_path) not in end.error
    for name in ("a", "b"):
        assert tokens(told[name, 0]) == said(served.judge, name, prompt, 6)


def test_an_engine_believes_nobody(served: Served) -> None:
    """A front end has looked at the name already."""
    engine = fresh_engine(served.engine, config=replace(served.engine.config, allowed_lora_sources="gs://"))
    asked = adapted_request("x", [5], served.folder / "a")
    [end] = drive(engine, [asked])["x", 0]
    assert (end.kind, "not taken from there" in end.error) == ("UnknownModel", True)
    with pytest.raises(InvalidRequest, match="--enable_lora"):
        check_request(asked, replace(engine.limits, max_adapters=0))


def test_many_who_ask_cause_one_download(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    is_there = threading.Event()

    def fetch(address: str, cache: Path, wish: Any) -> Path:
        fetched.append(address)
        is_there.wait()
        return served.folder / "a"

    monkeypatch.setattr(adapter_source, "fetch_from_bucket", fetch)
    config = replace(served.engine.config, allowed_lora_sources="/,gs://bucket")
    engine, prompt = fresh_engine(served.engine, config=config), LLAMA.prompt(2)
    slow = AdapterRef("slow", "gs://bucket/slow")
    waiting = [
        replace(adapted_request(f"s{i}", prompt, None, max_tokens=3), adapter=slow) for i in range(100)
    ]
    other = adapted_request("b", prompt, served.folder / "b", max_tokens=6)

    def between(_: int) -> None:
        """It comes when the other has ended."""
        if len(engine.book._active) == len(waiting):
            is_there.set()

    told = drive(engine, [*waiting, other], between)
    assert fetched == ["gs://bucket/slow"]
    assert tokens(told["b", 0]) == said(served.judge, "b", prompt, 6)
    assert all(tokens(told[one.request_id, 0]) == said(served.judge, "a", prompt, 3) for one in waiting)


def test_not_too_many_fill_the_memory_while_they_wait(
    served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(adapters, "MAX_WAITING", 1)
    engine, names, alive = fresh_engine(served.engine), [f"{i}" for i in range(8)], list[int]()
    for i, name in enumerate(names):  # eight that differ
        config = json.loads((shutil.copytree(served.folder / "a", tmp_path / name) / FILE).read_text())
        (tmp_path / name / FILE).write_text(json.dumps({**config, "lora_alpha": i + 1}))
    asked = [adapted_request(name, LLAMA.prompt(0), tmp_path / name, max_tokens=4) for name in names]
    told = drive(engine, asked, lambda _: alive.append(len(engine.book._adapters._alive)))
    assert len({tuple(tokens(told[name, 0])) for name in names}) > 1
    assert 3 <= max(alive) <= 2 + 1 + 1, "in slots, kept, and waiting"


def test_who_waits_for_a_slot_is_not_passed_for_ever(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters have all slots, and requests for them never end to come; a third gets its turn."""
    monkeypatch.setattr(book, "PATIENCE_S", 0.0)
    engine, prompt, ended = fresh_engine(served.engine), LLAMA.prompt(0), set[str]()
    for name in ("a", "b", "c"):
        engine.add(adapted_request(name, prompt, served.folder / name, max_tokens=4))
    for i in range(200):
        engine.add(adapted_request(f"{i}", prompt, served.folder / NAMES[i % 2], max_tokens=4))
        ended |= {one.request_id for one in engine.step() if one.finish_reason}
        engine.check()
        if "c" in ended:
            break
    assert "c" in ended
    assert engine.stats.running_adapters or engine.stats.waiting_adapters
    drive(engine)


def test_llm_takes_one_for_all_or_one_for_each(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_engine(config: EngineConfig, progress: bool) -> tuple[Engine, None]:
        return fresh_engine(served.engine, config=config), None

    monkeypatch.setattr(llm_module, "load_engine", load_engine)
    prompts, folder = [LLAMA.prompt(i) for i in range(3)], served.folder
    llm = LLM(folder / "model", enable_lora=True, lora_modules=f"named={folder / 'b'}")
    greedy = adapted_request("", [1], None, max_tokens=6).params

    def told(adapters: Any) -> list[list[int]]:
        outputs = llm.generate(None, greedy, prompt_token_ids=prompts, lora_request=adapters, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def expected(*names: str | None) -> list[list[int]]:
        return [said(served.judge, name, prompt, 6) for name, prompt in zip(names, prompts, strict=True)]

    assert told(folder / "a") == told(str(folder / "a")) == expected("a", "a", "a")
    assert told(["named", None, folder / "c"]) == expected("b", None, "c")
    for wrong, message in (
        (["named"], "1 lora_request for 3 prompts"),
        ("unknown", "`unknown` does not exist"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            told(wrong)


def churn(served: Served, folder: Path, num_requests: int, num_adapters: int) -> None:
    """Requests for adapters that are replaced on the disk meanwhile: each gets what lies there at first."""
    generator, engine, now = random.Random(0), fresh_engine(served.engine), dict[Path, str]()
    prompts = [LLAMA.prompt(0)[:n] + LLAMA.prompt(1)[:m] for n, m in ((20, 3), (20, 5), (9, 2))]

    def place(path: Path) -> None:
        now[path] = generator.choice(NAMES)
        path.mkdir(exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(served.folder / now[path] / file, path / "new")
            os.replace(path / "new", path / file)

    def is_loaded(path: Path) -> bool:
        """By all who have named it; they may still run."""
        refs = [active.request.adapter for active in engine.book._preparing.values()]
        return all(ref is None or ref.source != str(path) for ref in refs)

    paths = [folder / f"{i}" for i in range(num_adapters)]
    for path in paths:
        place(path)
    expected: dict[str, list[int]] = {}
    got: dict[str, list[int]] = {}
    while len(expected) < num_requests or engine.has_work:
        while len(expected) < num_requests and len(engine.book._active) < 12:
            request_id, path, prompt = f"{len(expected)}", generator.choice(paths), generator.choice(prompts)
            name, num_tokens = generator.choice((now[path],) * 9 + (None,)), generator.randrange(1, 6)
            expected[request_id] = said(served.judge, name, prompt, num_tokens)
            engine.add(adapted_request(request_id, prompt, path if name else None, max_tokens=num_tokens))
        for update in engine.step():
            got.setdefault(update.request_id, []).extend(update.token_ids)
            assert not update.error
        engine.check()
        loaded = [path for path in paths if is_loaded(path)]
        if loaded and generator.random() < 0.3:
            place(generator.choice(loaded))
    assert got == expected
    engine.check_idle()


def test_adapters_come_and_go(served: Served, tmp_path: Path) -> None:
    churn(served, tmp_path, num_requests=60, num_adapters=5)


@pytest.mark.slow
def test_ten_thousand_requests_for_forty_adapters(tmp_path: Path) -> None:
    served = serve(tmp_path, max_loras=16, recompile="error")
    served.engine.warm_up()
    churn(served, tmp_path, num_requests=10_000, num_adapters=40)
    assert served.engine.stepper.runner.num_late_compiles == 0
