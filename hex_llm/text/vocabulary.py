"""A tokenizer as grammars see it: the bytes that each token stands for, and how a text ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from hex_llm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """What llguidance must know of a tokenizer, under the names that it uses."""

    tokens: list[bytes]  # one for each logit
    special_token_ids: list[int]  # these stand for no text
    eos_ids: tuple[int, ...]
    known: npt.NDArray[np.int32]  # a mask of those that the tokenizer has

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary | None:
        """None: it is not known what text the tokens stand for, or how a text ends."""
        codec = tokenizer.codec
        eos_ids = tuple(i for i in eos_ids if 0 <= i < vocab_size)
        if not codec.has_bytes or not eos_ids:
            return None
        known = [codec.token(i) != "" or i in eos_ids for i in range(vocab_size)]
        known += [False] * (-vocab_size % 32)
        return cls(
            tokens=[codec.token_bytes(i, False) for i in range(vocab_size)],
            special_token_ids=sorted(i for i in {*codec.special_ids, *eos_ids} if i < vocab_size),
            eos_ids=eos_ids,
            known=np.packbits(known, bitorder="little").view(np.int32),
        )

    @property
    def eos_token_id(self) -> int:
        return self.eos_ids[0]

    bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("nothing is to be cut into tokens here")

    def knows(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.tokens) and bool(self.known[token_id >> 5] >> (token_id & 31) & 1)

    def table(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self), eos_token=list(self.eos_ids))
