"""The first generation's command: `python -m hex_llm.entrypoints.api_server ...` is `hex-llm serve ...`."""

import sys

from hex_llm.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
