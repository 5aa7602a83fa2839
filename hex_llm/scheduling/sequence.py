"""One request's tokens and where it stands; derived numbers are properties."""

from __future__ import annotations

from dataclasses import dataclass, field

from hex_llm.types import FinishReason, SamplingParams


@dataclass
class Sequence:
    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_len: int  # tokens after which it ends, prompt included
    recompute_len: int | None = (
        None  # growing past it, the sequence is prefilled anew (ModelSpec.recompute_len)
    )
    token_ids: list[int] = field(default_factory=list)  # the prompt, then what was generated
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose KV is in the cache
    num_prefilled: int = 0  # tokens that the last prefill took in: their rope frequencies are for this length
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def needs_prefill(self) -> bool:
        return self.num_computed == 0

    def append(self, token_id: int) -> None:
        """Takes in the token that the last step chose, and notices the end."""
        self.num_computed = len(self.token_ids)
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.token_ids) >= self.max_len:
            self.finish_reason = FinishReason.LENGTH
        elif self.recompute_len is not None and len(self.token_ids) == self.recompute_len + 1:
            self.num_computed = 0
