"""A newcomer's path: the commands of the README's "Try it", as they stand there, in a clean clone, timed.

    python -m tools.newcomer [REPOSITORY]

Models and compiled programs are kept in a new folder; what pip has fetched before is the machine's.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

HEALTH, READY_S = "http://localhost:7080/health", 3600


def commands(readme: str) -> list[str]:
    """Of the section, block by block, but not the tests; what continues a line stays with it."""
    section = readme.partition("\n## Try it\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.strip().replace("\\\n", " ").split("\n")]
    return [line for line in lines if line != "make test"]


def answers() -> bool:
    try:
        urlopen(HEALTH, timeout=5)
    except OSError:
        return False
    return True


def main() -> int:
    repository = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    if answers():
        raise SystemExit("someone listens on port 7080 already")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        clone, environ = Path(folder, "clone"), {**os.environ, "HEX_LLM_CACHE": f"{folder}/cache"}
        subprocess.run(["git", "clone", "--quiet", repository, clone], check=True)
        serve, *rest = commands((clone / "README.md").read_text())
        server = subprocess.Popen(serve.split(), cwd=clone, env=environ, start_new_session=True)
        try:
            while not answers():
                if server.poll() is not None or time.monotonic() > started + READY_S:
                    raise SystemExit(f"{serve}: the server is not ready")
                time.sleep(0.2)
            print(f"== {time.monotonic() - started:.0f} s: {serve}", flush=True)
            # One shell, as a newcomer has it; each command is shown with the seconds that it took.
            timed = [
                f"b=$SECONDS; {one}\necho; echo == $((SECONDS - b)) s: {shlex.quote(one)}" for one in rest
            ]
            return subprocess.run(["bash", "-ec", "\n".join(timed)], cwd=clone, env=environ).returncode
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


if __name__ == "__main__":
    raise SystemExit(main())
