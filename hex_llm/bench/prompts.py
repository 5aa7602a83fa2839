"""Made-up prompts with an exact number of tokens: as token ids, or as words that are one token each."""

from __future__ import annotations

from string import ascii_lowercase

import numpy as np

from hex_llm.bench.backends import Prompt
from hex_llm.bench.tokenizers import BenchTokenizer
from hex_llm.errors import HexError

WORDS = """
the of and to in is it you that he was for on are with as his they at be this from have or by one
had not but what all were when we there can an your which their said if do will each about how up
out them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water long
little very after words called
"""
TRIES = 8


class IdPrompts:
    """Needs no tokenizer, only the size of the vocabulary."""

    def __init__(self, rng: np.random.Generator, vocab_size: int) -> None:
        self._rng, self._vocab_size = rng, vocab_size
        self.empty: Prompt = []

    def extended(self, start: Prompt, num_tokens: int) -> Prompt:
        """`start` and so many tokens more."""
        return [*start, *self._rng.integers(0, self._vocab_size, num_tokens).tolist()]


class TextPrompts:
    """Text that a tokenizer, which has been asked, cuts into just so many tokens."""

    def __init__(self, rng: np.random.Generator, tokenizer: BenchTokenizer) -> None:
        self._rng, self._tokenizer = rng, tokenizer
        self.empty: Prompt = ""
        self._units = [f" {word}" for word in WORDS.split() if self._adds_one(f" {word}")]
        # A vocabulary without words, such as of bytes, has letters at least.
        self._units = self._units or [letter for letter in ascii_lowercase if self._adds_one(letter)]
        if not self._units:
            raise HexError("the tokenizer has no token for a word or letter; prompts cannot be made up")

    def _adds_one(self, unit: str) -> bool:
        return self._count("a" + 3 * unit) == self._count("a" + 2 * unit) + 1

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def extended(self, start: Prompt, num_tokens: int) -> Prompt:
        """`start` and so many tokens more; those that a server puts before a prompt count at its start."""
        start = str(start) if start else ""
        target = (self._count(start) if start else 0) + num_tokens
        units: list[str] = []
        text, missing = start, num_tokens
        for _ in range(TRIES):
            if not missing:
                break
            if missing > 0:
                units += self._rng.choice(self._units, missing).tolist()
            else:
                del units[missing:]
            text = start + "".join(units)
            missing = target - self._count(text)
        return text
