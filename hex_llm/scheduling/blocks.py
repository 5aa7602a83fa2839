"""The pool of KV blocks: who holds which, and which hold a known prefix.

Plain arithmetic; the memory itself belongs to the runner. A block that nobody holds keeps its content, and
the key under which it can be found again, until it is handed out anew: the longest unused first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from struct import pack
from types import MappingProxyType

PADDING_BLOCK = 0  # never handed out: padded tokens write there
CHECKED_AT_ONCE = 4096  # blocks: a millisecond or two


def root_key(*parts: str) -> bytes:
    """Where the chain of a sequence's block keys begins: with its salt, and the type that the cache holds.
    Surrogates of broken text must not raise."""
    return sha256(_joined(parts)).digest()


def next_key(parent: bytes, token_ids: Sequence[int], extra: Sequence[str] = ()) -> bytes:
    """The key of a block: everything before it, its own tokens, and what else its KV depends on."""
    return sha256(parent + pack(f"<{len(token_ids)}i", *token_ids) + _joined(extra)).digest()


def _joined(parts: Sequence[str]) -> bytes:
    """Each with its length, so that no two lists of parts give the same."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(pack("<q", len(part)) + part for part in encoded)


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int, kv_dtype: str = "") -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.kv_dtype = kv_dtype  # what blocks hold: a part of their keys
        self.num_holders = [0] * num_blocks  # of each block
        self._free = OrderedDict.fromkeys(range(1, num_blocks))  # the next to be handed out first
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._next_checked = 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those that keep a prefix among them."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by the prefix which they hold, free or not."""
        return len(self._block_of)

    @property
    def published(self) -> Mapping[bytes, int]:
        """The blocks that can be found, by their keys."""
        return MappingProxyType(self._block_of)

    @property
    def num_usable(self) -> int:
        """Blocks that sequences may hold at all."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def take(self, count: int) -> list[int]:
        assert count <= self.num_free, f"{count = } exceeds {self.num_free = }"
        return [self._take_one() for _ in range(count)]

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each."""
        for block in blocks:
            self._free.pop(block, None)
            self.num_holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder less for each. The end of a prefix is given up before its beginning."""
        for block in reversed(blocks):
            self.num_holders[block] -= 1
            assert self.num_holders[block] >= 0, f"{block = } was released too often"
            if self.num_holders[block] == 0:
                self._free[block] = None
                if block not in self._key_of:  # nothing to be found again: first to be reused
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> None:
        """From now on `find(key)` gives this block, unless another one holds the same already."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block] = block, key

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of as many of the keys as are known, from the first on."""
        found = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            found.append(block)
        return found

    def forget(self) -> None:
        """What blocks hold is lost: none of it can be found any more."""
        self._key_of.clear()
        self._block_of.clear()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Every block is free or held by exactly those who say so (reliability I1, I2)."""
        holders = Counter(block for blocks in held for block in blocks)
        assert PADDING_BLOCK not in holders, "the padding block is held"
        for block in range(1, self.num_blocks):
            assert self.num_holders[block] == holders[block], f"{block = } has the wrong number of holders"
            assert (block in self._free) == (holders[block] == 0), f"{block = } is free and held, or lost"
        assert len(self._free) + len(holders) == self.num_usable
        assert self._block_of == {key: block for block, key in self._key_of.items()}

    def check_some_free(self) -> None:
        """That the next blocks in turn are free, as all are when nobody holds any."""
        blocks = range(self._next_checked, min(self._next_checked + CHECKED_AT_ONCE, self.num_blocks))
        for block in blocks:
            assert self.num_holders[block] == 0, f"{block = } is held by nobody known"
            assert block in self._free, f"{block = } is lost"
        self._next_checked = blocks.stop if blocks.stop < self.num_blocks else 1
        assert len(self._block_of) == len(self._key_of)

    def _take_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
        assert self.num_holders[block] == 0
        self.num_holders[block] = 1
        return block
