from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from hex_llm.checks import doctor
from hex_llm.cli import main


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EngineConfig", lambda: SimpleNamespace(cache_dir=tmp_path / "cache"))


def findings(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, str]], str]:
    code = main(["doctor", "--json"])
    printed = capsys.readouterr()
    return code, {one["name"]: one for one in json.loads(printed.out)}, printed.err


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("PORT", str(taken.getsockname()[1]))
        code, found, error = findings(capsys)
    assert code == 1
    assert "found\n" in error
    assert found["port"]["problem"] == "someone listens there already"
    assert found["port"]["remedy"] == "hex-llm serve --port=0"
    assert "jax " in found["versions"]["value"]
    assert found["devices"]["value"].endswith("× cpu (cpu)")


def test_a_gpu_that_jax_does_not_see(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_nvidia_driver", lambda: "580.1, NVIDIA H200, 143771 MiB")
    code, found, _ = findings(capsys)
    assert code == 1
    assert found["driver"]["remedy"] == 'pip install "hex-llm[gpu]"'


def test_a_cache_of_someone_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache").mkdir(mode=0o777)
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setattr(doctor, "CHECKS", (doctor._disk,))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr()
    assert "writable by others" in printed.out
    assert "set HEX_LLM_CACHE to a folder of yours" in printed.out
    assert printed.err == "error: 1 problem found\n"


def test_all_is_well(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor._packages, doctor._disk))
    assert main(["doctor"]) == 0
    assert "!" not in capsys.readouterr().out
    assert main(["doctor", "--jsn"]) == 2
