"""Who runs in the next step: first come, first served; a step prefills or decodes, never both.

A sequence is admitted when blocks for its longest possible life are free, so a running one never waits.
Pure Python: no arrays, no devices.
"""

from __future__ import annotations

from collections import deque

from hex_llm.errors import InvalidRequest
from hex_llm.scheduling.blocks import BlockPool
from hex_llm.scheduling.sequence import Sequence
from hex_llm.types import Chunk, StepPlan


class Scheduler:
    def __init__(self, pool: BlockPool, max_prefill_seqs: int, max_decode_seqs: int) -> None:
        self.pool = pool
        self.max_prefill_seqs = max_prefill_seqs
        self.max_decode_seqs = max_decode_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def check_fits(self, sequence: Sequence) -> None:
        """Refuses what could never run, whatever else finishes."""
        needed = self.pool.blocks_for(sequence.max_len)
        if needed > self.pool.num_usable:
            raise InvalidRequest(
                f"prompt and max_tokens need {needed} KV blocks of {self.pool.block_size} tokens, but there "
                f"are only {self.pool.num_usable}: lower max_tokens or raise --num_blocks",
                "max_tokens",
            )

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> tuple[StepPlan, list[Sequence]]:
        """The next step, and the sequences of its rows in order. Empty when nothing is left to do."""
        self._admit()
        prefills = [s for s in self.running if s.needs_prefill][: self.max_prefill_seqs]
        if prefills:
            return StepPlan(prefills=tuple(self._prefill(s) for s in prefills)), prefills
        return StepPlan(decodes=tuple(self._decode(s) for s in self.running)), list(self.running)

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_decode_seqs:
            needed = self.pool.blocks_for(self.waiting[0].max_len)
            if needed > self.pool.num_free:
                return
            sequence = self.waiting.popleft()
            sequence.blocks = self.pool.take(needed)
            self.running.append(sequence)

    def _prefill(self, sequence: Sequence) -> Chunk:
        sequence.num_prefilled = len(sequence.token_ids)
        blocks = self._reached(sequence, sequence.num_prefilled)
        return Chunk(tuple(sequence.token_ids), 0, blocks, sequence.num_prefilled)

    def _decode(self, sequence: Sequence) -> Chunk:
        position = sequence.num_computed
        span = max(position + 1, sequence.num_prefilled)
        return Chunk((sequence.token_ids[position],), position, self._reached(sequence, position + 1), span)

    def _reached(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        return tuple(sequence.blocks[: self.pool.blocks_for(num_tokens)])
