"""One choice of one request: its tokens and where it stands. Few stored numbers, the rest are properties.

A step's results are read after the next step has been sent off, so a sequence may be longer than the host
knows: `num_unread` of its tokens exist on the device only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling.blocks import next_key
from hex_llm.types import Chunk, FinishReason

NO_SLOT = 0  # padded rows of a step use it


class State(Enum):
    WAITING = auto()  # it holds nothing
    PREFILLING = auto()  # it holds a slot and blocks; not all of its tokens were sent off
    IN_TRANSFER = auto()  # what its blocks hold is on its way to another runner: no step takes it in
    DECODING = auto()  # all of its tokens were sent off
    ENDING = auto()  # it has ended, but a step in flight still touches what it holds
    ENDED = auto()


IN_TRANSFER = State.IN_TRANSFER  # what hot paths ask for: members of an Enum are slow to look up
PREFILLING = State.PREFILLING

MOVES = {
    State.WAITING: {State.PREFILLING, State.ENDED},
    State.PREFILLING: {State.DECODING, State.IN_TRANSFER, State.WAITING, State.ENDING},
    State.IN_TRANSFER: {State.DECODING, State.WAITING, State.ENDING},
    State.DECODING: {State.IN_TRANSFER, State.WAITING, State.ENDING},
    State.ENDING: {State.ENDED},
    State.ENDED: set[State](),
}


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
    extra_keys: Mapping[int, str] = field(default_factory=dict)  # Request.extra_keys
    cache_len: int | None = None  # longer than this, what its blocks hold depends on its length
    waits_for_tokens: bool = False  # its next step needs the host to know the last token

    state: State = State.WAITING
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
        length = self.length  # this is asked for each row of each step
        if length - self.num_computed != 1 or length >= self.max_len or self.is_held:
            return False
        waits = self.waits_for_tokens and self.num_unread
        return not (waits or self.state is IN_TRANSFER or self.must_restart)

    def move_to(self, state: State) -> None:
        assert state in MOVES[self.state], f"from {self.state.name} to {state.name}"
        self.state = state

    def take_in(self, num_tokens: int) -> Chunk:
        """The next so many tokens go into a step that is sent off now."""
        end = self.num_computed + num_tokens
        samples = end == self.length
        chunk = Chunk(self.slot, self.num_computed, num_tokens, self.blocks, self.rope_length, samples)
        self.num_computed = end
        self.num_in_flight += 1
        self.num_unread += samples
        if samples and self.state is PREFILLING:
            self.move_to(State.DECODING)
        return chunk

    def read(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """Takes in what the oldest unread step chose: the tokens up to its end, and why it ends, if it does.

        Where there are several, that step has left the KV of all but the last in the cache.
        """
        assert len(token_ids) == 1 or self.num_unread == 1, "a later step was sent off for its second token"
        self.num_unread -= 1
        all_ids, num_before, reason = self.token_ids, len(self.token_ids), None
        for token_id in token_ids:
            all_ids.append(token_id)
            if token_id in self.stop_ids:
                reason = FinishReason.STOP
                break
            if len(all_ids) >= self.max_len:
                reason = FinishReason.LENGTH
                break
        num_more = len(all_ids) - num_before - 1
        self.num_computed += num_more
        self.num_written += num_more
        return token_ids[: num_more + 1], reason

    def keys(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Of its first blocks, whose tokens must all be known."""
        assert self.cache_key is not None
        while len(self.block_keys) < num_blocks:
            start = len(self.block_keys) * block_size
            parent = self.block_keys[-1] if self.block_keys else self.cache_key
            token_ids = self.token_ids[start : start + block_size]
            extra = [
                f"{at - start} {key}"
                for at, key in self.extra_keys.items()
                if start <= at < start + block_size
            ]
            self.block_keys.append(next_key(parent, token_ids, extra))
        return self.block_keys[:num_blocks]
