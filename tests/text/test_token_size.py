"""What a text's size tells of its tokens, and that others go on while a long one is cut into them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from hex_llm.errors import InvalidRequest
from hex_llm.frontend.beside import read
from hex_llm.text import bpe
from hex_llm.text.tokenizer import Fast, Tokenizer
from tests.server.lag import like_a_server, watched

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
LOST = "Ć"  # the byte 6
WORDS = ("ab", "abab", "ababab", "ababababab", "ĠĠ", "ĠĠĠĠ")
MERGES = [("a", "b"), ("ab", "ab"), ("abab", "ab"), ("abab", "ababab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
LONGEST = 10


def of(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(Fast(tokenizer), (), {}, None)


def byte_level(normalizer: normalizers.Normalizer | None = None, lost: str = "") -> tokenizers.Tokenizer:
    tokens = [char for char in ALPHABET if char not in lost] + list(WORDS)
    model = models.BPE({token: i for i, token in enumerate(tokens)}, MERGES)
    return bpe.byte_level(model, split=bpe.QWEN2_SPLIT, normalizer=normalizer)


def sentencepiece() -> tokenizers.Tokenizer:
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "a", "b", "▁", "ab", "▁▁", "abab"]
    merges = [("a", "b"), ("▁", "▁"), ("ab", "ab")]
    tokenizer = bpe.sentencepiece({token: i for i, token in enumerate(tokens)}, merges)
    bpe.shape_llama(tokenizer)
    return tokenizer


def with_token(**how: bool) -> tokenizers.Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<longer than all others>", **how)])
    return tokenizer


def words() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


CERTAIN: list[Callable[[], tokenizers.Tokenizer]] = [
    byte_level, lambda: byte_level(lost=LOST), lambda: byte_level(normalizers.NFC()),
    sentencepiece, with_token,
]  # fmt: skip
UNCERTAIN: list[Callable[[], tokenizers.Tokenizer]] = [
    words, lambda: with_token(rstrip=True), lambda: byte_level(normalizers.Strip()),
    lambda: byte_level(normalizers.Replace("a", "")),
]  # fmt: skip


@pytest.mark.parametrize("make", CERTAIN + UNCERTAIN)
def test_no_text_that_fits_is_refused(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer, chosen = of(make()), random.Random(0)
    pieces = ["ab" * 5, " ", "\n", "\x06", "é", "각", "\U00100000", "<longer than all others>", "a"]
    texts = [piece * 2000 for piece in pieces]
    texts += ["".join(chosen.choices(pieces[:n], k=500)) for n in (2, 4, 9) for _ in range(20)]
    for text in texts:
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        tokenizer.refuse_longer(text, num_tokens + 1)


@pytest.mark.parametrize("make", CERTAIN)
def test_what_cannot_fit_is_refused(make: Callable[[], tokenizers.Tokenizer]) -> None:
    tokenizer = of(make())
    with pytest.raises(InvalidRequest, match=r"the prompt has at least (1[6-9]|[23]\d) tokens") as caught:
        tokenizer.refuse_longer("a" * 10_000, 16)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("make", UNCERTAIN)
def test_tokens_that_may_stand_for_any_text(make: Callable[[], tokenizers.Tokenizer]) -> None:
    assert of(make()).codec.longest is None


def test_bytes_without_a_token_are_left_out() -> None:
    tokenizer = of(byte_level(lost=LOST))
    text = "\x06" * 100_000
    assert tokenizer.encode(text, add_special_tokens=False) == []
    tokenizer.refuse_longer(text, 16)
    assert tokenizer.codec.longest == (LONGEST, b"\x06")


def test_the_loop_goes_on_while_a_long_text_is_cut_into_tokens() -> None:
    tokenizer = of(byte_level())
    text = "abcd, efgh " * 100_000
    with like_a_server():
        ids, pause, took = asyncio.run(watched(read(len(text), lambda: tokenizer.encode(text))))
    assert ids[:9] == tokenizer.encode(text[:100])[:9]
    assert len(ids) > 100_000
    assert pause < took / 2
