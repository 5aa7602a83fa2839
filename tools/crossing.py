"""The product's files that one plain streamed chat crosses, in both processes, in the order of their calls.

python -m tools.crossing [--all]    # with the embedded default model, on this machine

A file is touched if a function of it runs while the chat is served, and none while the server is idle: what
beats, watches and waits all the time is no part of the way. It is crossed if it also calls another one: the
way goes on there. The others are leaves, which a reader need not open to follow it. What the devices run was
traced and compiled before, so the decoder is not seen here. `--all` names the functions too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FLAGS = ("--host=127.0.0.1", "--port=0", "--max_decode_seqs=8", "--max_model_len=2048")
IDLE_S = 5
# Python imports it at the start of each process. A signal ends a phase: starting, idle, at the chat.
HOOK = """
import json, os, pathlib, signal, sys, threading, time
folder, root, phases = os.environ["HEX_LLM_CROSSING"], os.environ["HEX_LLM_ROOT"], []

def called(frame, event, _):
    if phases and event == "call" and frame.f_code.co_filename.startswith(root):
        phases[-1].setdefault((frame.f_code.co_filename, frame.f_code.co_qualname), time.monotonic())
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(root):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != frame.f_code.co_filename:
            phases[-1].setdefault((caller.f_code.co_filename, ""), time.monotonic())  # it calls another

def end_phase(*_):
    phases.append({})
    if len(phases) == 3:
        calls = [[[*code, when] for code, when in phase.items()] for phase in phases[:2]]
        pathlib.Path(folder, str(os.getpid())).write_text(json.dumps(calls))

signal.signal(signal.SIGUSR2, end_phase)
threading.setprofile(called)
sys.setprofile(called)
"""


def ask(address: str, question: str) -> str:
    host = http.client.HTTPConnection(address, timeout=60)
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": 16}
    host.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    try:
        return host.getresponse().read().decode()
    finally:
        host.close()


def traced(folder: Path) -> list[list[list[Any]]]:
    """Of each process: the calls of the idle time, then of a chat, with their times."""
    (folder / "sitecustomize.py").write_text(HOOK)
    calls = folder / "calls"
    calls.mkdir()
    env = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "HEX_LLM_CROSSING": str(calls)}
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "hex_llm.cli", "serve", *FLAGS],
            cwd=ROOT,
            env={**os.environ, **env, "HEX_LLM_ROOT": f"{ROOT / 'hex_llm'}{os.sep}"},
            stdout=file,
            stderr=file,
        )
    try:
        while not (ready := re.search(r"ready on http://(\S+)", log.read_text())):
            if server.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        ask(ready[1], "What is the capital of Spain?")  # what runs once does not count
        time.sleep(2)
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        for question in ("", "What is the capital of France?", None):
            for pid in (server.pid, *map(int, children)):
                os.kill(pid, signal.SIGUSR2)
            if question is not None:
                time.sleep(0.5)
                assert not question or "[DONE]" in ask(ready[1], question)
                time.sleep(0.5 if question else IDLE_S)
        while len(files := [*calls.iterdir()]) < 2:
            time.sleep(0.1)
        time.sleep(0.5)
        return [json.loads(file.read_text()) for file in files]
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the functions too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes = traced(Path(folder))
    idle = {file for before, _ in processes for file, _, _ in before}
    calls = sorted((when, file, name) for _, during in processes for file, name, when in during)
    names: dict[str, list[str]] = {}
    for _, file, name in calls:
        names.setdefault(file, []).append(name)
    touched = [file for file in names if file not in idle]
    crossed = [file for file in touched if "" in names[file]]
    for number, file in enumerate(crossed, 1):
        print(f"{number:3} {shown(file)}", *(filter(None, names[file]) if args.all else ()), sep="\n      ")
    print("leaves:", *(shown(file) for file in touched if file not in crossed))
    print("also while idle:", *sorted(shown(file) for file in names if file in idle))


def shown(file: str) -> str:
    return str(Path(file).relative_to(ROOT))


if __name__ == "__main__":
    main()
