"""Which replica a request goes to: where the longest part of its prompt is cached, unless that one is clearly
busier, else where the least is going on.

What replicas hold is guessed from what was sent to them, block by block; a wrong guess costs some prefilling,
nothing else. Plain numbers: knows neither texts nor processes. No jax.
"""

from __future__ import annotations

from collections.abc import Mapping

from hex_llm.admission import Limits
from hex_llm.scheduling.blocks import root_key
from hex_llm.types import Request

# How much more the replica with the prefix may have to do than the least busy one.
BUSIER, MORE = 1.5, 8


class Sent:
    """The keys of blocks that a replica was sent, as many as it can hold: two halves, of which the one that
    was begun later is added to. When each key was last used would take longer to note than all the rest."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._old, self._young = set[int](), set[int]()

    def num_held(self, keys: list[int]) -> int:
        """From the first on."""
        old, young = self._old, self._young
        for i, key in enumerate(keys):
            if key not in young and key not in old:
                return i
        return len(keys)

    def add(self, keys: list[int], most: int) -> None:
        self.num_requests += 1
        self._young.update(keys)
        if len(self._young) > most // 2:
            self._old, self._young = self._young, set()

    def clear(self) -> None:
        self._old, self._young = set(), set()


class Router:
    def __init__(self, num_replicas: int) -> None:
        self._sent = [Sent() for _ in range(num_replicas)]

    def choose(self, request: Request, limits: Limits, loads: Mapping[int, int]) -> int:
        """One of those whose `loads` are given, and it counts as sent there."""
        keys, sent = block_keys(request, limits.block_size), self._sent
        # Among equals who was chosen least, so that all caches are made use of.
        ranks = [(-sent[i].num_held(keys), load, sent[i].num_requests, i) for i, load in loads.items()]
        _, load, _, chosen = min(ranks)
        if load > BUSIER * min(loads.values()) + MORE:
            chosen = min(rank[1:] for rank in ranks)[-1]
        sent[chosen].add(keys, limits.max_blocks)
        return chosen

    def forget(self, replica: int) -> None:
        """All that it held."""
        self._sent[replica].clear()


def block_keys(request: Request, block_size: int) -> list[int]:
    """Of its whole blocks, each for all tokens up to its end. They are not the engine's, which takes ten
    times as long for keys that nobody can forge; whoever forges these moves his own requests."""
    adapter = "" if request.adapter is None else request.adapter.source
    ids, keys = tuple(request.prompt_ids), []
    key = int.from_bytes(root_key(request.cache_salt, adapter)[:8])
    for start in range(0, len(ids) - block_size + 1, block_size):
        key = hash((key, ids[start : start + block_size]))
        keys.append(key)
    return keys
