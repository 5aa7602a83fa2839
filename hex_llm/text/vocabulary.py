"""A tokenizer as grammars see it: the bytes that each token stands for, and how a text ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from hex_llm.text.bpe import bytes_of
from hex_llm.text.spm import Slow
from hex_llm.text.tokenizer import Fast, Tokenizer


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
        tokens = (
            _fast(codec) if isinstance(codec, Fast) else _slow(codec) if isinstance(codec, Slow) else None
        )
        eos_ids = tuple(i for i in eos_ids if 0 <= i < vocab_size)
        if tokens is None or not eos_ids:
            return None
        texts, special = tokens
        known = np.zeros(-(-vocab_size // 32) * 32, bool)
        known[[i for i in {*texts, *eos_ids} if i < vocab_size]] = True
        return cls(
            tokens=[texts.get(i, b"") for i in range(vocab_size)],
            special_token_ids=sorted(i for i in {*special, *eos_ids} if i < vocab_size),
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


def _fast(codec: Fast) -> tuple[dict[int, bytes], set[int]] | None:
    """The bytes of each token as the decoder makes them, and the special tokens."""
    decoder: Any = codec.tokenizer.decoder
    kinds = set(re.findall(r'"type":\s*"(\w+)"', decoder.__getstate__().decode() if decoder else ""))
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _sentencepiece
    else:
        return None
    added = codec.tokenizer.get_added_tokens_decoder()
    texts = {i: to_bytes(token) for token, i in codec.tokenizer.get_vocab(with_added_tokens=True).items()}
    special = {i for i, token in added.items() if token.special}
    return texts | {i: added[i].content.encode() for i in special}, special


def _slow(codec: Slow) -> tuple[dict[int, bytes], set[int]]:
    processor, added = codec.processor, codec.added
    texts = {i: _sentencepiece(processor.id_to_piece(i)) for i in range(codec.num_pieces)}
    texts |= {i: token.content.encode() for i, token in added.items()}
    special = {i for i, token in added.items() if token.special}
    return texts, special | {i for i in range(codec.num_pieces) if processor.is_unknown(i)} - set(added)


def _sentencepiece(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _byte_level(token: str) -> bytes:
    """A token that is not spelled in the characters that stand for bytes is meant as it is."""
    data = bytes_of(token)
    return token.encode() if data is None else data
