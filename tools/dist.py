"""Builds the wheel and tries it: installed into an empty environment it must plan, serve and answer.

python -m tools.dist [--out dist]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = [
    "--host=127.0.0.1",
    "--port=0",
    "--no-warmup",
    "--max_model_len=256",
    "--max_decode_seqs=2",
    "--num_blocks=32",
]
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(one) for one in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def ask(address: str, body: object) -> str:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    reply = json.load(urllib.request.urlopen(request, timeout=120))
    return str(reply["choices"][0]["message"]["content"])


def try_server(python: Path, folder: Path) -> None:
    command = [python, "-m", "hex_llm.server.api_server", *FLAGS]
    server = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if line.startswith("hex_llm is ready on "):
                answer = ask(line.split()[-1], QUESTION)
                assert "Paris" in answer, answer
                print(f"it answers: {answer}")
                return
        sys.exit("the server ended before it was ready")
    finally:
        server.terminate()
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args().out
    started = time.monotonic()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={out}", ROOT, cwd=ROOT)
    wheel = max(out.glob("hex_llm-*.whl"), key=lambda path: path.stat().st_mtime)
    print(f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # not the root: nothing may be found there by chance
        venv.create(folder / "env", with_pip=True)
        python = folder / "env/bin/python"
        run(python, "-m", "pip", "install", "--quiet", wheel, cwd=folder)
        print(run(folder / "env/bin/hex-llm", "--version", cwd=folder).strip())
        plan = json.loads(run(folder / "env/bin/hex-llm", "plan", "--on=v5e-1", "--json", cwd=folder))
        assert plan["options"][0]["name"] == "v5e-1"
        try_server(python, folder)
    print(f"done in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
