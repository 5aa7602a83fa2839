"""The command line, `hex-llm`: picks the command and turns errors into one line and an exit code.

Codes: 0 done, 1 the model or server failed, 2 a wrong command line or environment, 130 interrupted.
With HEX_LLM_VERBOSE_LOG=true an error's traceback is printed too.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches

from hex_llm import __version__
from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.flags import BOOLEANS, help_text, parse

USAGE = """usage: hex-llm COMMAND [arguments]

commands:
  serve [MODEL] [flags]   serve a model over HTTP; `hex-llm serve --help` lists the flags

  --version               print the version
  --help                  print this"""


def serve(argv: Sequence[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return
    engine_config, server_config = parse(argv, os.environ)
    # Imported late, so that neither --help nor a wrong flag waits for the server's libraries.
    from hex_llm.launch.local import serve as launch

    launch(engine_config, server_config)


COMMANDS = {"serve": serve}


def run(argv: Sequence[str]) -> None:
    command, *rest = argv or ["--help"]
    if command in ("--help", "-h"):
        print(USAGE)
    elif command == "--version":
        print(f"hex-llm {__version__}")
    elif command in COMMANDS:
        COMMANDS[command](rest)
    else:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(COMMANDS)}"
        raise ConfigError(f"{one_line(command)}: unknown command; {hint}")


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
    return 0


if __name__ == "__main__":
    sys.exit(main())
