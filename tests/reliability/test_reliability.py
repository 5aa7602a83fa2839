"""Each of the long runs for about a minute; their modules tell how the whole ones are run."""

from __future__ import annotations

import subprocess

import pytest

from tests.reliability import faults, hostile, overload, soak

pytestmark = pytest.mark.slow


def test_ordinary_streams_beside_an_attacker() -> None:
    assert hostile.main(["--minutes=1", "--quiet_s=20"]) == 0


@pytest.mark.parametrize("name", [name for name in faults.FAULTS if name not in ("raises", "disk_full")])
def test_a_fault_under_load(name: str) -> None:
    assert faults.main(["--rounds=1", f"--only={name}"]) == 0


def test_a_full_disk_under_load() -> None:
    try:
        assert faults.main(["--rounds=1", "--only=disk_full"]) == 0
    except subprocess.CalledProcessError:
        pytest.skip("no file system may be mounted here")


def test_exceptions_on_the_way_of_requests() -> None:
    """One on either side of the border for a request alone, and one for all."""
    points = [
        *("server hex_llm.text.detokenize:Detokenizer.add", "server hex_llm.ipc.protocol:Reader.decode"),
        *(
            "engine hex_llm.engine.engine:Stepper._record",
            "engine hex_llm.execution.step_runner:StepRunner.read",
        ),
    ]
    assert faults.main(["--rounds=1", "--only", "raises", "--points", *points]) == 0


def test_overload() -> None:
    """So few requests are a rough measure of what is served."""
    assert overload.main(["--minutes=0.75", "--saturate_s=25", "--min_goodput=0.8"]) == 0


def test_soak() -> None:
    assert soak.main(["--minutes=1.5"]) == 0
