"""Hex-LLM's documented command: `python -m hex_llm.server.api_server ...` is `hex-llm serve ...`."""

import sys

from hex_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
