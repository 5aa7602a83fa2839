"""The chat of the terminal, with a real server around a fake model, which says the prompt backwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hex_llm.bench.client import Server
from hex_llm.cli import main
from hex_llm.errors import ConfigError, HexError
from hex_llm.terminal.chat import HELP, Session
from tests.server.fakes import FakeBackend, byte_tokenizer
from tests.server.live import live


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(byte_tokenizer())


@pytest.fixture(scope="module")
def address(backend: FakeBackend) -> Iterator[str]:
    with live(backend) as address:
        yield address


@pytest.fixture
def written() -> list[str]:
    return []


@pytest.fixture
def session(address: str, written: list[str]) -> Session:
    return Session(Server(address, {}), system="Be brief.", write=written.append)


def test_answers_are_streamed_and_remembered(session: Session, written: list[str]) -> None:
    session.take("abc")
    assert len([one for one in written if one.strip()]) > 3, "pieces, as they come"
    assert [one["role"] for one in session.messages] == ["system", "user", "assistant"]
    answer = session.messages[-1]["content"]
    assert "".join(written).strip() == answer.strip()
    session.take("def")
    assert session.messages[3]["content"] == "def"
    assert answer[::-1] in session.messages[-1]["content"][::-1], "the history was sent"


def test_commands(session: Session, written: list[str], tmp_path: Path, backend: FakeBackend) -> None:
    session.take("/help")
    assert written == [HELP + "\n"]
    session.take("/set max_tokens 3")
    session.take("/set stop ###")
    session.take("abc")
    assert backend.asked[-1].params.max_tokens == 3
    assert backend.asked[-1].params.stop == ("###",)
    session.take("/save " + str(tmp_path / "talk.json"))
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved == session.messages
    session.take("/retry")
    assert session.messages == saved
    session.take("/clear")
    assert [one["role"] for one in session.messages] == ["system"]
    session.take("/system Be kind.")
    written.clear()
    for command in ("/system", "/model", "/set"):
        session.take(command)
    assert written == ["Be kind.\n", "* fake\n", '{"max_tokens": 3, "stop": "###"}\n']
    session.take("/exit")
    assert not session.is_open


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/halp", "/halp: unknown, or not now; /help lists the commands"),
        ("/model other", "other: the server has fake"),
        ("/save /none/x", "/none/x: No such file or directory"),
        ("/retry", "/retry: unknown, or not now"),
    ],
)
def test_wrong_commands(session: Session, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        session.take(line)


def test_a_request_that_is_refused_changes_nothing(session: Session) -> None:
    session.take("/set temperature -1")
    before = list(session.messages)
    with pytest.raises(HexError, match=r"HTTP 400: .*temperature"):
        session.take("abc")
    assert session.messages == before


def test_the_command(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", f"--url={address}", "--prompt=abc"]) == 0
    assert "cba" in capsys.readouterr().out
    assert main(["chat", f"--url={address}", "--set=max_tokens=2", "--prompt=abc"]) == 0
    assert len(capsys.readouterr().out.strip()) == 2
    lines = iter(["abc", "/nonsense", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert main(["chat", f"--url={address}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"fake on {address}; /help lists the commands\n")
    assert "error: /nonsense: unknown, or not now" in printed
    assert main(["chat", "--url=http://127.0.0.1:9"]) == 1
    assert "is unreachable" in capsys.readouterr().err
    assert main(["chat", f"--url={address}", "--seed=3"]) == 2
    assert "a server that runs takes no flags" in capsys.readouterr().err
    assert main(["chat", "--sead=3"]) == 2
    assert "--sead: unknown flag" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_is_started_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--no-warmup", "--max_model_len=256", "--num_blocks=32", "--max_decode_seqs=2"]
    assert main(["chat", *flags, "--set=temperature=0", "--prompt=What is the capital of France?"]) == 0
    assert "Paris" in capfd.readouterr().out


@pytest.mark.slow
def test_a_server_that_cannot_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "/no/such/model"]) == 1
    printed = capfd.readouterr().err
    assert "there is no file or folder '/no/such/model'" in printed
    assert "the server ended with code 1; what it said stands above" in printed
