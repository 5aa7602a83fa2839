"""One choice of one request: its tokens and where it stands. Few stored numbers, the rest are properties.

A step's results are read after the next step has been sent off, so a sequence may be longer than the host
knows: `num_unread` of its tokens exist on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling.blocks import next_key
from hex_llm.types import Chunk, FinishReason

NO_SLOT = 0  # padded rows of a step use it


@dataclass(eq=False)
class Sequence:
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_len: int  # tokens after which it ends, prompt included
    index: int = 0  # which choice of its request
    priority: int = 0
    recompute_len: int | None = None  # growing past it, it is computed anew (ModelSpec.recompute_len)
    cache_key: bytes | None = None  # where its chain of block keys begins; None: shares no blocks
    cache_len: int | None = None  # longer than this, what its blocks hold depends on its length
    waits_for_tokens: bool = False  # its next step needs the host to know the last token

    token_ids: list[int] = field(default_factory=list)  # the prompt, then what was generated and read
    num_unread: int = 0  # further tokens, chosen by steps that were sent off and not read yet
    num_in_flight: int = 0  # steps that it takes part in and that were not read yet
    blocks: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of its first blocks, as far as they were needed
    num_published: int = 0  # blocks
    num_written: int = 0  # tokens whose KV is in the cache by the steps that were read
    slot: int = NO_SLOT
    slot_is_written: bool = False  # the device remembers it there
    num_computed: int = 0  # tokens whose KV is in the cache, or will be after the steps sent off
    rope_length: int = 0  # its length when it was last prefilled on purpose: rope frequencies are for that
    num_cached: int | None = None  # prompt tokens found in the prefix cache; None before it is admitted
    num_preempted: int = 0
    is_held: bool = False  # what may come next is still being found out: no step takes it in
    rank: float = 0.0  # when it came, as far as its priority lets that count
    arrival: int = 0
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.prompt_ids)
        self.rope_length = self.rope_length or len(self.token_ids)

    @property
    def order(self) -> tuple[float, int]:
        """Who comes first, runs first."""
        return self.rank, self.arrival

    @property
    def length(self) -> int:
        return len(self.token_ids) + self.num_unread

    @property
    def num_left(self) -> int:
        """Tokens whose KV is still to be computed."""
        return self.length - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def must_restart(self) -> bool:
        """It has grown past the length that its keys were made for."""
        return self.recompute_len is not None and self.rope_length <= self.recompute_len < self.length

    @property
    def shares_blocks(self) -> bool:
        """Its blocks hold what any sequence's would that begins alike."""
        longest = max(self.rope_length, self.num_computed)
        return self.cache_key is not None and (self.cache_len is None or longest <= self.cache_len)

    @property
    def can_decode(self) -> bool:
        """Its last token alone is left, wherever that is known, and another one may follow."""
        ready = self.num_left == 1 and self.length < self.max_len and not self.must_restart
        return ready and not self.is_held and not (self.waits_for_tokens and self.num_unread)

    def take_in(self, num_tokens: int) -> Chunk:
        """The next so many tokens go into a step that is sent off now."""
        end = self.num_computed + num_tokens
        samples = end == self.length
        chunk = Chunk(self.slot, self.num_computed, num_tokens, self.blocks, self.rope_length, samples)
        self.num_computed = end
        self.num_in_flight += 1
        self.num_unread += samples
        return chunk

    def read(self, token_id: int) -> FinishReason | None:
        """Takes in the token that the oldest unread step chose; why it is the last one, if it is."""
        self.num_unread -= 1
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_len else None

    def keys(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Of its first blocks, whose tokens must all be known."""
        assert self.cache_key is not None
        while len(self.block_keys) < num_blocks:
            start = len(self.block_keys) * block_size
            parent = self.block_keys[-1] if self.block_keys else self.cache_key
            self.block_keys.append(next_key(parent, self.token_ids[start : start + block_size]))
        return self.block_keys[:num_blocks]
