import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hex_llm.cli import main
from hex_llm.config import EngineConfig, ServerConfig
from hex_llm.errors import ModelError
from hex_llm.flags import FLAGS

ROOT = Path(__file__).parent.parent
DOORS = ["hex_llm.server.api_server", "hex_llm.entrypoints.api_server"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for flag in FLAGS for name in flag.env):
        monkeypatch.delenv(name, raising=False)


def with_launcher(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., None]) -> None:
    monkeypatch.setitem(sys.modules, "hex_llm.launch.local", SimpleNamespace(serve=serve))


def start(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_serve_hands_both_configs_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[tuple[EngineConfig, ServerConfig]] = []
    with_launcher(monkeypatch, lambda *configs: served.append(configs))
    monkeypatch.setenv("PORT", "81")
    assert main(["serve", "org/model", "--seed", "3"]) == 0
    ((engine, server),) = served
    assert (engine.model, engine.seed, server.port) == ("org/model", 3, 81)


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: hex-llm COMMAND")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("hex-llm ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serv"], "error: serv: unknown command; did you mean serve?\n"),
        (
            ["train"],
            "error: train: unknown command; there is serve, bench, plan, verify, chat, doctor, deploy\n",
        ),
        (["serve", "--seed=x"], "error: --seed=x: must be a whole number from 0 to 2^31-1\n"),
    ],
)
def test_wrong_commands(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(("verbose", "traceback"), [("", False), ("false", False), ("TRUE", True)])
def test_an_error_is_one_line_unless_verbose(
    verbose: str, traceback: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ModelError("the weights are cut short")

    with_launcher(monkeypatch, fail)
    monkeypatch.setenv("HEX_LLM_VERBOSE_LOG", verbose)
    assert main(["serve"]) == 1
    printed = capsys.readouterr().err
    assert printed.endswith("error: the weights are cut short\n")
    assert ("Traceback" in printed) == traceback == (printed.count("\n") > 1)


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with_launcher(monkeypatch, interrupt)
    assert main(["serve"]) == 130


@pytest.mark.parametrize("module", DOORS)
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--block_size=7", "error: --block_size=7: must be one of 8, 16, 32, 2048, 8192\n"),
        ("--max_modle_len=8", "error: --max_modle_len: unknown flag; did you mean --max_model_len?\n"),
        ("--dtype=x", "error: --dtype=x: must be one of auto, float32, bfloat16, float16\n"),
    ],
)
def test_the_documented_commands_refuse_in_one_line(module: str, flag: str, message: str) -> None:
    done = start(module, flag)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


@pytest.mark.parametrize("module", DOORS)
def test_the_documented_commands_have_help(module: str) -> None:
    done = start(module, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--hbm_utilization_factor" in done.stdout


def test_help_does_not_wait_for_jax() -> None:
    script = (
        "import sys; from hex_llm.cli import main; main(['serve', '--help']); assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
