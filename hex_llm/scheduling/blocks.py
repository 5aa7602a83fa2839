"""The pool of KV blocks: who holds which. Plain arithmetic; the memory itself belongs to the runner."""

from __future__ import annotations

PADDING_BLOCK = 0  # never handed out: padded tokens write there


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that sequences may hold at all."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, f"{count = } exceeds {self.num_free = }"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(reversed(blocks))
        assert self.num_free <= self.num_usable, "a block was given back twice"
