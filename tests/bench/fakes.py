from __future__ import annotations

from hex_llm.ipc.stats import Stats
from hex_llm.types import Request
from tools.fake_engine import FakeEngine


class CachingEngine(FakeEngine):
    """Counts what an engine with a prefix cache and padded steps would."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts: list[list[int]] = []
        self._num_queries = self._num_hits = 0

    def add(self, request: Request) -> None:
        ids = list(request.prompt_ids)
        self._num_queries += len(ids)
        if self._prompts:  # all of one conversation
            assert ids[: len(self._prompts[-1])] == self._prompts[-1]
            self._num_hits += len(self._prompts[-1])
        self._prompts.append(ids)
        super().add(request)

    @property
    def stats(self) -> Stats:
        stats = super().stats
        stats.num_prefix_queries, stats.num_prefix_hits = self._num_queries, self._num_hits
        stats.num_padding = 3 * self.num_steps
        return stats
