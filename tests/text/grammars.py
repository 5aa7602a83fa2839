"""A tokenizer with its grammars, and random walks through what they allow."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from hex_llm.sampling_params import StructuredOutputs
from hex_llm.text.grammar import GrammarFactory, Matcher, Vocabulary
from hex_llm.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.corpus import train_byte_level, train_sentencepiece, write_json

Bits = np.ndarray[Any, np.dtype[np.bool_]]
TOKENIZERS = ("default", "byte_level", "llama", "gemma", "slow", "unigram")


def trained(name: str, folder: Path) -> Tokenizer:
    if name == "byte_level":
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False)
        train_byte_level(cut, ["<|endoftext|>", "<|im_end|>"]).save(str(folder / "tokenizer.json"))
        eos = "<|endoftext|>"
    else:
        kind = "unigram" if name == "unigram" else "bpe"
        train_sentencepiece(folder / "tokenizer.model", gemma=name == "gemma", kind=kind)
        eos = "<eos>" if name == "gemma" else "</s>"
    kind = "GemmaTokenizer" if name == "gemma" else "LlamaTokenizer"
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": kind, "eos_token": eos})
    write_json(folder / "config.json", {"model_type": "llama"})
    return load_tokenizer(folder, mode="slow" if name == "slow" else "auto")


class Setting:
    """A tokenizer, and a factory whose logits are wider than it and which has two ends of a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = (*tokenizer.eos_ids, tokenizer.eos_ids[0] + 1)
        self.vocab_size = tokenizer.vocab_size + 77
        self.factory = GrammarFactory(tokenizer, self.vocab_size, self.eos_ids)
        self.start = tokenizer.encode("a", add_special_tokens=False)
        vocabulary = Vocabulary.of(tokenizer, self.vocab_size, self.eos_ids)
        assert vocabulary is not None
        self.vocabulary = vocabulary
        self.closing = [vocabulary.tokens.index(char.encode()) for char in '"}]:,;09']

    def compile(self, **wanted: Any) -> Matcher:
        return self.factory.submit(StructuredOutputs(**wanted)).result()

    def decode(self, ids: list[int]) -> str:
        """As it follows other text."""
        return self.tokenizer.decode([*self.start, *ids], skip_special_tokens=False).removeprefix("a")

    def id_of(self, text: str) -> int:
        return self.vocabulary.tokens.index(text.encode())

    def allowed(self, matcher: Matcher) -> Bits:
        words = matcher.mask()
        assert words.shape == (-(-self.vocab_size // 32),)
        assert words.dtype == np.int32
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
        assert not bits[self.tokenizer.vocab_size :].any()
        assert len({bool(bits[i]) for i in self.eos_ids}) == 1
        return bits

    def walk(self, matcher: Matcher, rng: random.Random) -> str:
        """Takes tokens at random, after a while rather those that bring it to an end."""
        ids: list[int] = []
        while len(ids) < 200:
            bits = self.allowed(matcher)
            self.refuses(matcher, bits, rng)
            token_id = self.choose(bits, len(ids), rng)
            assert matcher.accept(token_id)
            if token_id in self.eos_ids:
                return self.decode(ids)
            ids.append(token_id)
        raise AssertionError(f"no end is in sight of {self.decode(ids)}")

    def choose(self, bits: Bits, num_tokens: int, rng: random.Random) -> int:
        closing = [*self.eos_ids, *self.closing] if num_tokens > 30 else rng.sample(self.eos_ids, k=1)
        if num_tokens > 30 or rng.random() < 0.2:
            for token_id in closing:
                if bits[token_id]:
                    return token_id
        return int(rng.choice(np.flatnonzero(bits)))

    def refuses(self, matcher: Matcher, bits: Bits, rng: random.Random) -> None:
        for token_id in rng.choices(np.flatnonzero(~bits), k=3) if not bits.all() else []:
            assert not matcher.accept(int(token_id))
        for token_id in (-1, self.vocab_size, 2**40):
            assert not matcher.accept(token_id)
        if rng.random() < 0.05:
            assert (self.allowed(matcher) == bits).all()
