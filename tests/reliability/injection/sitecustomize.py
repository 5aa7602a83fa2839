"""Makes a function raise once, in every Python process that has this folder on its path: for tests alone.

HEX_FAULT_POINTS names the functions, "side module:qualname" by lines, where a side is `server` or `engine`;
HEX_FAULT_FOLDER holds the file `armed`: one such line, and which of the coming calls is to raise. The process
that raises renames it to `fired`.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

POLL_S = 0.02
SIDE = "engine" if "hex_llm.engine.worker" in sys.orig_argv else "server"
FOLDER = Path(os.environ.get("HEX_FAULT_FOLDER", "."))
NAMED = [line.split() for line in os.environ.get("HEX_FAULT_POINTS", "").splitlines()]
POINTS = [point.split(":") for side, point in NAMED if side == SIDE]


class Injected(RuntimeError):
    pass


class Armed:
    """The point that is to raise, and after how many more calls."""

    point = ""
    left = 0
    lock = threading.Lock()

    def watch(self) -> None:
        while True:
            try:
                side, point, count = (FOLDER / "armed").read_text().split()
                with self.lock:
                    if side == SIDE and not self.point:
                        self.point, self.left = point, int(count)
            except (OSError, ValueError):
                self.point = ""
            time.sleep(POLL_S)

    def called(self, point: str) -> None:
        with self.lock:
            if self.point != point:
                return
            self.left -= 1
            if self.left > 0:
                return
            self.point = ""
            try:
                (FOLDER / "armed").rename(FOLDER / "fired")  # by one process only
            except OSError:
                return
        raise Injected(f"injected into {point}")


ARMED = Armed()


def wrapped(function: Any, point: str) -> Any:
    if isinstance(function, property):
        return property(wrapped(function.fget, point))

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        ARMED.called(point)
        return function(*args, **named)

    return call


def wrap_points(module: ModuleType) -> None:
    for name, path in POINTS:
        if name == module.__name__:
            *owners, last = path.split(".")
            owner: Any = module
            for one in owners:
                owner = getattr(owner, one, module)
            if last not in vars(owner):  # who arms it will see that it is never called
                continue
            setattr(owner, last, wrapped(vars(owner)[last], f"{name}:{path}"))


class Finder(importlib.abc.MetaPathFinder):
    """Finds what the others find, and wraps it when it has been run, before anyone can take a name of it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if all(name != fullname for name, _ in POINTS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                wrap_points(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if POINTS:
    sys.meta_path.insert(0, Finder())
    threading.Thread(target=ARMED.watch, name="faults", daemon=True).start()
