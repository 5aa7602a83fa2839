"""What was made before is kept out of Python's search for garbage, which would hold up steps and streams: the
more sequences run, the more often it goes through all that was loaded and compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_all() -> None:
    """For the rest of the process."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # a step may make thousands of objects


@contextmanager
def kept() -> Iterator[None]:
    """Meanwhile. A caller who keeps it for ever is left alone."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
