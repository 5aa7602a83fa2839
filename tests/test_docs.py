"""The documentation: commands are parsed, requests answered, Python compiled; and the site builds."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hex_llm.cli import COMMANDS
from hex_llm.flags import parse
from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.live import live
from tests.test_readme import run_without_curl
from tools.plot_benchmarks import PICTURES, described, table

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [(page.name, kind, text) for page in PAGES for kind, text in FENCE.findall(page.read_text())]
LINES = [
    (page, line)
    for page, kind, text in BLOCKS
    for line in text.replace("\\\n", " ").splitlines()
    if kind == "bash" and line.strip()
]
SERVERS = ("hex-llm serve", "python -m hex_llm.server.api_server")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with live(FakeBackend(byte_tokenizer())) as address:
        yield address


def test_requests_are_answered(address: str) -> None:
    requests = [line for _, line in LINES if line.startswith("curl ") and "//localhost:7080/" in line]
    assert len(requests) >= 5
    for line in requests:
        args = shlex.split(line.replace("http://localhost:7080", address))[1:]
        assert run_without_curl(args)[0] == 200, line


def test_commands_are_understood() -> None:
    served = 0
    for page, line in LINES:
        words = shlex.split(line, comments=True)
        environ = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        command = " ".join(words[len(environ) :])
        if start := next((one for one in SERVERS if command.startswith(one)), None):
            parse(words[len(environ) + len(start.split()) :], environ)
            served += 1
        elif words[:1] == ["hex-llm"]:
            assert words[1] in COMMANDS, (page, line)
    assert served >= 8


def test_python_compiles_and_links_lead_somewhere() -> None:
    pages = {page.name for page in PAGES}
    for name, kind, text in BLOCKS:
        if kind == "python":
            compile(text, name, "exec")
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert target in pages or (page.parent / target).exists(), (page.name, target)


def test_the_family_of_the_example_works() -> None:
    """What the page adds is added, and read from a config."""
    from hex_llm.models import families
    from tests.tiny import BASE

    code = next(text for page, kind, text in BLOCKS if (page, kind) == ("families.md", "python"))
    assert code.count("\n") < 30
    scope = dict(vars(families))
    exec(code, scope)
    spec = scope["example"](families.HFConfig({**BASE, "num_hidden_layers": 4, "sliding_window": 8}))
    assert [layer.mask.window for layer in spec.layers] == [None, 8, None, 8]
    assert (spec.qkv_bias, spec.tied) == (True, True)


def test_messages_of_the_troubleshooting_are_real() -> None:
    source = "".join(path.read_text() for path in (ROOT / "hex_llm").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts over several lines
    rows = re.findall(r"^\| `([^`]+)`", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 8
    for message in rows:
        for piece in message.split("…"):
            assert piece.strip() in source, (message, piece)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    if not mkdocs.exists():
        pytest.skip('pip install "hex-llm[docs]"')
    command = [mkdocs, "build", "--strict", "--quiet", f"--site-dir={tmp_path}"]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    flags = (tmp_path / "flags/index.html").read_text()
    assert "--hbm_utilization_factor" in flags


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_shows_its_table(name: str) -> None:
    """Where it does not: python -m tools.plot_benchmarks"""
    rows = table((ROOT / "docs/benchmarks.md").read_text(), PICTURES[name][0])
    assert described(rows) in (ROOT / "docs" / name).read_text()
