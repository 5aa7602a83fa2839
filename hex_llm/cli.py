"""The command line, `hex-llm`: picks the command and turns errors into one line and an exit code.

Codes: 0 done, 1 the model or server failed, 2 a wrong command line or environment, 130 interrupted.
With HEX_LLM_VERBOSE_LOG=true an error's traceback is printed too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import TypeVar

from hex_llm import __version__
from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.flags import BOOLEANS, help_text, parse

USAGE = """usage: hex-llm COMMAND [arguments]

commands:
  serve [MODEL] [flags]   serve a model over HTTP; `hex-llm serve --help` lists the flags
  bench COMMAND [flags]   measure: serve, latency, throughput, compare
  plan MODEL [flags]      where a model fits, how fast it is there, what it costs, what to type
  verify [MODEL] [flags]  a model here and in transformers, layer by layer
  chat [MODEL] [flags]    chat in the terminal, with a server that runs (--url) or is started
  doctor                  what this machine has, what is wrong with it, what to type
  deploy vertex MODEL     upload, deploy and ask a model on Vertex AI; --dry-run prints the calls

  --version               print the version
  --help                  print this"""

BENCH_USAGE = """usage: hex-llm bench COMMAND [flags]

commands, each with a --help of its own:
  serve        a server under a load; flags, results and JSON are those of `vllm bench serve`
  compare A B  the same load against two servers by turns, as ratios with their spread
  latency      how long one batch takes, without a server
  throughput   tokens a second of many prompts, without a server"""
# Imported late: a load generator waits for neither jax nor the engine.
BENCH = {
    "serve": ("serve", "serve"),
    "compare": ("serve", "compare"),
    "latency": ("offline", "latency"),
    "throughput": ("offline", "throughput"),
}
T = TypeVar("T")


def serve(argv: Sequence[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return
    engine_config, server_config = parse(argv, os.environ)
    # Imported late, so that neither --help nor a wrong flag waits for the server's libraries.
    from hex_llm.launch.local import serve as launch

    launch(engine_config, server_config)


def bench(argv: Sequence[str]) -> None:
    name, *rest = argv or ["--help"]
    if name in ("--help", "-h"):
        print(BENCH_USAGE)
        return
    module, function = chosen(name, BENCH)
    getattr(import_module(f"hex_llm.bench.{module}"), function)(rest)


# Whose modules are imported late too: neither jax nor the engine is waited for where a flag is wrong.
ELSEWHERE = {
    "plan": "planning.commands",
    "verify": "checks.verify",
    "chat": "terminal.chat",
    "doctor": "checks.doctor",
    "deploy": "planning.commands",
}


def elsewhere(name: str, argv: Sequence[str]) -> None:
    getattr(import_module(f"hex_llm.{ELSEWHERE[name]}"), name)(argv)


COMMANDS = {"serve": serve, "bench": bench} | {name: partial(elsewhere, name) for name in ELSEWHERE}


def chosen(name: str, commands: Mapping[str, T]) -> T:
    if name in commands:
        return commands[name]
    near = get_close_matches(name, commands, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(commands)}"
    raise ConfigError(f"{one_line(name)}: unknown command; {hint}")


def run(argv: Sequence[str]) -> None:
    command, *rest = argv or ["--help"]
    if command in ("--help", "-h"):
        print(USAGE)
    elif command == "--version":
        print(f"hex-llm {__version__}")
    else:
        chosen(command, COMMANDS)(rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    try:
        run(sys.argv[1:] if argv is None else argv)
    except HexError as error:
        if BOOLEANS.get(os.environ.get("HEX_LLM_VERBOSE_LOG", "").lower()):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has enough, as `head`; nothing more is to be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
