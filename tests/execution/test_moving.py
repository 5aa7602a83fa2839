"""Parcels between two posts of one process, over real sockets."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from hex_llm.execution import moving
from hex_llm.execution.messages import Address, MoveKeys
from hex_llm.execution.moving import Post

LIMIT_S = 30


def runner() -> Any:
    """As far as a post looks at one: two layers of pages."""
    pages = [jnp.zeros((9, 2, 1, 2, 8), jnp.bfloat16), jnp.zeros((9, 2, 1), jnp.float32)]
    return SimpleNamespace(pages=pages, paddings=SimpleNamespace(table_width=8), pages_from=jnp.asarray)


def contents(num_blocks: int) -> list[Any]:
    numbers = [np.arange(num_blocks * leaf[0].size, dtype=np.float32) for leaf in runner().pages]
    return [
        jnp.asarray(some.reshape(num_blocks, *leaf.shape[1:]), leaf.dtype)
        for some, leaf in zip(numbers, runner().pages, strict=True)
    ]


@contextmanager
def posts(*keys: MoveKeys) -> Iterator[tuple[list[Post], Any]]:
    """One for each of the keys, and what the first tells of parcels; then what the others do."""
    news: Any = [queue.SimpleQueue() for _ in keys]
    opened = [
        Post(own, "127.0.0.1", {i: runner()}, lambda *told, i=i: news[i].put(told))
        for i, own in enumerate(keys)
    ]
    try:
        yield opened, news
    finally:
        for one in opened:
            one.close()


def test_blocks_come_as_they_were_and_what_is_dropped_does_not():
    keys = MoveKeys.make()
    with posts(keys, keys) as ((here, there), (told, _)):
        here.drop(1)
        for parcel in (1, 2):
            there.send(parcel, Address(0, here.url), contents(4), 3)
        assert told.get(timeout=LIMIT_S) == (2, True)
        for came, sent in zip(here.take(2), contents(4), strict=True):
            np.testing.assert_array_equal(came[:3], sent[:3])
            assert len(came) == 4  # as PutBlocks wants it
            assert not came[3:].any()
        assert [*here._come, *here._pieces, *here._dropped] == []


def test_what_has_another_size_is_refused():
    keys = MoveKeys.make()
    with posts(keys, keys) as ((here, there), (told, _)):
        there.send(1, Address(0, here.url), [x[..., :1] for x in contents(4)], 3)
        assert told.get(timeout=LIMIT_S) == (1, False)
        there.send(2, Address(0, here.url), contents(4), 3)
        while told.get(timeout=LIMIT_S) != (2, True):
            pass


def test_strangers_are_not_let_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moving, "SEND_MS", 500)
    keys, others = MoveKeys.make(), MoveKeys.make()
    half = MoveKeys(keys.inlet, others.outlet)  # knows whom to ask, but not as whom
    with posts(keys, others, half) as ((here, *strangers), (told, *lost)):
        for stranger, told_there in zip(strangers, lost, strict=True):
            stranger.send(1, Address(0, here.url), contents(4), 3)
            assert told_there.get(timeout=LIMIT_S) == (1, False)
        assert told.empty()
