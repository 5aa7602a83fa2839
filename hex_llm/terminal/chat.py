"""`hex-llm chat`: a chat in the terminal, with a server that runs, or with one that is started for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from hex_llm.bench.arguments import Flag, Parser
from hex_llm.bench.client import Server
from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.flags import read_flags

SHOW = partial(print, end="", flush=True)
START_S, POLL_S = 600, 0.2
HELP = """/help             this
/clear            forget the conversation
/system TEXT      how the model is to behave; without TEXT, show it
/model NAME       another model or adapter of this server; without NAME, list them
/set NAME VALUE   a field of the requests (temperature, max_tokens, top_p, seed, ...); without, show them
/retry            ask the last question again
/save FILE        write the conversation as JSON
/exit             leave, as Ctrl-D does; Ctrl-C ends an answer"""


def chat(argv: Sequence[str]) -> None:
    about = "Chats with a server; without --url it starts one, and further flags are its own."
    parser = Parser("chat", about, "[MODEL] [flags]", program="hex-llm")
    flags: list[Flag] = [
        ("url", str, None, "a server that runs, such as http://localhost:7080"),
        ("api-key", str, os.environ.get("VLLM_API_KEY"), "its key; also VLLM_API_KEY"),
        ("system", str, None, "how the model is to behave"),
        ("prompt", str, None, "ask this, print the answer and leave"),
        ("set", {"action": "append"}, [], "NAME=VALUE, a field of the requests; may be given several times"),
    ]
    parser.add_flags("flags", flags)
    args, rest = parser.parse(argv)
    given = read_flags(rest).values  # wrong ones are told here
    if args.url and given.keys() - {"model"}:
        raise ConfigError(f"{rest[0]}: a server that runs takes no flags; only --url and a model's name")
    with _server(args.url, rest, args.api_key) as server:
        session = Session(server, args.system, given.get("model") if args.url else None)
        for field in args.set:
            session.command("set", field.replace("=", " ", 1))
        if args.prompt is not None:
            session.take(args.prompt)
            return
        with suppress(ImportError):
            import readline  # noqa: F401 # input() has a history then
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
        if name.startswith("/"):
            self.command(name[1:], rest.strip())
        else:
            self.say(line)

    def say(self, text: str) -> None:
        """The answer is written as it comes. One that fails leaves the conversation as it was."""
        asked, answer = [*self.messages, {"role": "user", "content": text}], []
        try:
            for delta in self._deltas(asked):
                self.write(delta.get("reasoning_content") or delta.get("reasoning") or "")
                answer.append(delta.get("content") or "")
                self.write(answer[-1])
        except KeyboardInterrupt:
            self.write(" [ended]")
        self.write("\n")
        self.messages = [*asked, {"role": "assistant", "content": "".join(answer)}]

    def _deltas(self, messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        body = {"model": self.model, "messages": messages, "stream": True, **self.fields}
        url, headers = f"{self.server.base_url}/v1/chat/completions", self.server.headers
        try:
            with urlopen(Request(url, json.dumps(body).encode(), headers)) as reply:
                for line in reply:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        raise HexError(one_line(str(chunk["error"]["message"])))
                    yield from (choice["delta"] for choice in chunk["choices"])
        except HTTPError as error:
            told = one_line(" ".join(error.read().decode("utf-8", "replace").split())[:300])
            raise HexError(f"HTTP {error.code}: {told}") from error
        except OSError as error:
            raise HexError(f"{url} is unreachable: {error}") from error

    def command(self, name: str, text: str) -> None:
        match name:
            case "help":
                self.write(HELP + "\n")
            case "clear":
                self.messages = [one for one in self.messages if one["role"] == "system"]
            case "system" if text:
                self._set_system(text)
            case "system":
                told = [one["content"] for one in self.messages if one["role"] == "system"]
                self.write(f"{told[0] if told else 'none'}\n")
            case "model":
                self._choose_model(text)
            case "set" if " " in text:
                field, _, value = text.partition(" ")
                with suppress(ValueError):
                    value = json.loads(value)
                self.fields[field] = value
            case "set":
                self.write(json.dumps(self.fields) + "\n")
            case "retry" if len(self.messages) > 1:
                *self.messages, question, _ = self.messages
                self.say(question["content"])
            case "save" if text:
                try:
                    Path(text).expanduser().write_text(
                        json.dumps(self.messages, indent=1, ensure_ascii=False)
                    )
                except OSError as error:
                    raise ConfigError(f"{text}: {error.strerror}") from error
            case "exit" | "quit":
                self.is_open = False
            case _:
                raise ConfigError(f"/{one_line(name)}: unknown, or not now; /help lists the commands")

    def _set_system(self, text: str) -> None:
        others = [one for one in self.messages if one["role"] != "system"]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *others]

    def _choose_model(self, name: str) -> None:
        known = [str(one["id"]) for one in json.loads(self.server.ask("/v1/models"))["data"]]
        if not name:
            self.write("\n".join(f"{'*' if one == self.model else ' '} {one}" for one in known) + "\n")
        elif name not in known:
            raise ConfigError(f"{one_line(name)}: the server has {', '.join(known)}")
        else:
            self.model = name


@contextmanager
def _server(url: str | None, flags: Sequence[str], api_key: str | None) -> Iterator[Server]:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    if url is not None:
        yield Server(url, headers)
        return
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
