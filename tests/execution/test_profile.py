"""--profile on real engines of a tiny model."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from hex_llm.errors import ConfigError
from hex_llm.execution.profile import NOTHING, NUM_STEPS, Recorder
from hex_llm.sampling_params import SamplingParams
from tests.engine.driving import drive, make_engine, request
from tests.tiny import FAMILIES

TINY = next(one for one in FAMILIES if one.name == "llama3")
AT_EXIT = """
import sys
from tests.engine.driving import drive, make_engine, request
engine = make_engine(sys.argv[1], profile=sys.argv[2])
drive(engine, [request("a", [5, 6, 7])])
"""


def names(folder: Path) -> Counter[str]:
    """Of the events in the only trace there."""
    [file] = folder.glob("plugins/profile/*/perfetto_trace.json.gz")
    assert len(list(file.parent.glob("*.xplane.pb"))) == 1  # what XProf reads
    with gzip.open(file) as trace:
        return Counter(event.get("name") for event in json.load(trace)["traceEvents"])


def test_the_first_steps_are_recorded_and_then_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TINY.save(tmp_path / "model")
    engine = make_engine(tmp_path / "model", profile=str(tmp_path / "new" / "trace"))
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 50, ignore_eos=True)
    with caplog.at_level(logging.INFO, "hex_llm"):
        drive(engine, [request("a", TINY.prompt(0), params)])
    found = names(tmp_path / "new" / "trace")
    # A step more than are read: the next one is on its way already. What came of the last is told afterwards.
    more = {"schedule": 0, "dispatch": 1, "pack": 1, "wait": 0, "tell": -1}
    assert {name: found[name] - NUM_STEPS for name in more} == more
    [file] = tmp_path.glob("new/trace/plugins/profile/*/perfetto_trace.json.gz")
    assert [r.getMessage() for r in caplog.records if "--profile" in r.getMessage()] == [
        f"--profile: recording {NUM_STEPS} steps",
        f"--profile: {NUM_STEPS} steps are in {file}, for ui.perfetto.dev",
    ]


@pytest.mark.slow
def test_a_process_that_ends_sooner_writes_what_there_is(tmp_path: Path) -> None:
    TINY.save(tmp_path / "model")
    command = [sys.executable, "-c", AT_EXIT, str(tmp_path / "model"), str(tmp_path / "trace")]
    subprocess.run(command, check=True, timeout=120)
    assert names(tmp_path / "trace")["dispatch"] == 16


def test_without_the_flag_nothing_is_noted() -> None:
    recorder = Recorder(None)
    assert recorder.step() is recorder.phase("pack") is NOTHING
    recorder.read_step()
    recorder.stop()


@pytest.mark.parametrize("broken", ["start_trace", "stop_trace"])
def test_a_trace_that_fails_does_not_fail_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no space")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, broken, fail)
    recorder = Recorder(str(tmp_path), num_steps=1)
    with recorder.step():
        pass
    recorder.read_step()
    assert "no space" in caplog.text
    assert recorder.step() is NOTHING


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--profile=.*no folder can be made there"):
        Recorder(str(tmp_path / "file" / "trace"))
