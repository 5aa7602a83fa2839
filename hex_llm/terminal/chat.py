"""`hex-llm chat`: a chat in the terminal, with a server that runs, or with one that is started for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from hex_llm.bench.arguments import Flag, Parser
from hex_llm.bench.client import Refused, Server
from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.flags import read_flags

HISTORY = Path("~/.cache/hex_llm/chat_history")
SHOW = partial(print, end="", flush=True)
START_S, POLL_S = 600, 0.2
HELP = """/help             this
/clear            forget the conversation
/system TEXT      how the model is to behave; without TEXT, show it
/model NAME       another model or adapter of this server; without NAME, list them
/set NAME VALUE   a field of the requests (temperature, max_tokens, top_p, seed, ...); without, show them
/retry            ask the last question again
/save FILE        write the conversation as JSON
/load FILE        go on with a saved one
/exit             leave, as Ctrl-D does; Ctrl-C ends an answer"""


def chat(argv: Sequence[str]) -> None:
    about = "Chats with a server; without --url it starts one, and further flags are its own."
    parser = Parser("chat", about, "[MODEL] [flags]", program="hex-llm")
    flags: list[Flag] = [
        ("url", str, None, "a server that runs, such as http://localhost:7080"),
        ("api-key", str, os.environ.get("HEX_LLM_API_KEY"), "its key; also HEX_LLM_API_KEY"),
        ("system", str, None, "how the model is to behave"),
        ("prompt", str, None, "ask this, print the answer and leave"),
    ]
    parser.add_flags("flags", flags)
    args, rest = parser.parse(argv)
    if args.url and rest:
        model = read_flags(rest).values.pop("model", None)
        if model is None or len(rest) > 1:
            raise ConfigError(f"{rest[0]}: a server that runs takes no flags; only --url and a model's name")
    with _server(args.url, rest, args.api_key) as server:
        session = Session(server, args.system, model if args.url and rest else None)
        if args.prompt is not None:
            session.take(args.prompt)
            return
        _remember_lines()
        print(f"{session.model} on {server.base_url}; /help lists the commands")
        while session.is_open:
            try:
                session.take(input("> "))
            except EOFError:
                break
            except KeyboardInterrupt:
                print()
            except HexError as error:
                print(f"error: {error}")


class Session:
    """A conversation and what its requests say besides."""

    def __init__(
        self,
        server: Server,
        system: str | None = None,
        model: str | None = None,
        write: Callable[[str], object] = SHOW,
    ) -> None:
        self.server, self.write = server, write
        self.model = model or server.first_model()
        self.fields: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.is_open = True
        self._set_system(system or "")

    def take(self, line: str) -> None:
        """One line of the user's: a command, or something to say. HexError: it was refused."""
        if not line.strip():
            return
        name, _, rest = line.strip().partition(" ")
        if not name.startswith("/"):
            self.say(line)
        elif name[1:] in COMMANDS:
            COMMANDS[name[1:]](self, rest.strip())
        else:
            raise ConfigError(f"{one_line(name)}: unknown command; /help lists them")

    def say(self, text: str) -> None:
        """The answer is written as it comes. One that fails leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer: list[str] = []
        try:
            asyncio.run(self._stream(asked, answer))
        except KeyboardInterrupt:
            self.write(" [ended]")
        except OSError as error:
            raise HexError(f"{self.server.base_url} is unreachable: {error}") from error
        self.write("\n")
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    async def _stream(self, messages: list[dict[str, Any]], answer: list[str]) -> None:
        pending, fault = bytearray(), ""

        def feed(data: bytes, _: float) -> None:
            nonlocal fault
            pending.extend(data)
            *events, rest = bytes(pending).split(b"\n\n")
            pending[:] = rest
            for event in events:
                body = event.removeprefix(b"data: ")
                if body == b"[DONE]" or not event.startswith(b"data: "):
                    continue
                chunk = json.loads(body)
                fault = fault or str((chunk.get("error") or {}).get("message", ""))
                for choice in chunk.get("choices", []):
                    delta = choice.get("delta", {})
                    text = delta.get("content") or ""
                    self.write(delta.get("reasoning_content") or delta.get("reasoning") or "")
                    self.write(text)
                    answer.append(text)

        body = {"model": self.model, "messages": messages, "stream": True, **self.fields}
        await self.server.post("/v1/chat/completions", body, feed, f"chat-{time.time_ns()}")
        self.server.close()
        if fault:
            raise Refused(fault)

    # ---- commands

    def show_help(self, _: str) -> None:
        self.write(HELP + "\n")

    def clear(self, _: str) -> None:
        self.messages = [one for one in self.messages if one["role"] == "system"]

    def system(self, text: str) -> None:
        if text:
            self._set_system(text)
        else:
            told = [one["content"] for one in self.messages if one["role"] == "system"]
            self.write(f"{told[0] if told else 'none'}\n")

    def _set_system(self, text: str) -> None:
        others = [one for one in self.messages if one["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def choose_model(self, name: str) -> None:
        known = [str(one["id"]) for one in json.loads(self.server.ask("/v1/models"))["data"]]
        if not name:
            self.write("\n".join(f"{'*' if one == self.model else ' '} {one}" for one in known) + "\n")
        elif name not in known:
            raise ConfigError(f"{one_line(name)}: the server has {', '.join(known)}")
        else:
            self.model = name

    def set_field(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not value:
            self.write(json.dumps(self.fields) + "\n")
            return
        try:
            self.fields[name] = json.loads(value)
        except ValueError:
            self.fields[name] = value

    def retry(self, _: str) -> None:
        asked = [i for i, one in enumerate(self.messages) if one["role"] == "user"]
        if not asked:
            raise ConfigError("/retry: nothing was asked yet")
        text = self.messages[asked[-1]]["content"]
        self.messages = self.messages[: asked[-1]]
        self.say(text)

    def save(self, name: str) -> None:
        with _of_file(name):
            Path(name).expanduser().write_text(json.dumps(self.messages, indent=1, ensure_ascii=False))

    def load(self, name: str) -> None:
        with _of_file(name):
            messages = json.loads(Path(name).expanduser().read_text())
            self.messages = [{"role": str(one["role"]), "content": one["content"]} for one in messages]

    def leave(self, _: str) -> None:
        self.is_open = False


COMMANDS: Mapping[str, Callable[[Session, str], None]] = {
    "help": Session.show_help,
    "clear": Session.clear,
    "system": Session.system,
    "model": Session.choose_model,
    "set": Session.set_field,
    "retry": Session.retry,
    "save": Session.save,
    "load": Session.load,
    "exit": Session.leave,
    "quit": Session.leave,
}


@contextmanager
def _of_file(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name or 'FILE'}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{name}: no saved conversation") from error


@contextmanager
def _server(url: str | None, flags: Sequence[str], api_key: str | None) -> Iterator[Server]:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if url is not None:
        yield Server(url, headers)
        return
    read_flags(flags)  # wrong ones are told here
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hex_llm.cli", "serve", *flags, "--host=127.0.0.1", f"--port={port}"]
    print("starting a server; this may take a minute", file=sys.stderr)
    # In a group of its own: Ctrl-C ends an answer, not the server.
    process = subprocess.Popen(
        [*command, "--log_level=WARNING"], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        server = Server(f"http://127.0.0.1:{port}", headers)
        _await(server, process)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)


def _await(server: Server, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise HexError(f"the server ended with code {process.returncode}; what it said stands above")
        with suppress(HexError):
            server.ask("/health")
            return
        time.sleep(POLL_S)
    raise HexError(f"the server is not ready after {START_S} s")


def _remember_lines() -> None:
    """What was typed comes back with the arrow keys, in the next chat too."""
    try:
        import atexit
        import readline
    except ImportError:  # on Windows there is none
        return
    path = HISTORY.expanduser()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        readline.read_history_file(path)
    readline.set_history_length(1000)

    def write() -> None:
        with suppress(OSError):
            readline.write_history_file(path)

    atexit.register(write)
