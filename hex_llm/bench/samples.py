"""A request of a load, and what requests are made with."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hex_llm.bench.backends import Prompt
from hex_llm.bench.prompts import IdPrompts, TextPrompts
from hex_llm.bench.tokenizers import SMALLEST_VOCABULARY, BenchTokenizer
from hex_llm.errors import HexError


@dataclass(frozen=True, eq=False)
class Sample:
    """One request; a later turn of a conversation `follows` another, and its prompt is only what it adds."""

    prompt: Prompt
    prompt_len: int
    output_len: int
    follows: Sample | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Source:
    """What datasets are made with."""

    args: argparse.Namespace
    tokenizer: BenchTokenizer | None
    takes_ids: bool  # the backend takes token ids for a prompt
    vocab_size: int = SMALLEST_VOCABULARY

    @cached_property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.args.seed)

    @cached_property
    def prompts(self) -> IdPrompts | TextPrompts:
        if not self.takes_ids:
            return TextPrompts(self.rng, self.needed_tokenizer())
        return IdPrompts(self.rng, self.vocab_size)

    def needed_tokenizer(self) -> BenchTokenizer:
        if self.tokenizer is None:
            name = self.args.dataset_name
            raise HexError(f"--dataset-name {name}: needs a tokenizer; name a folder with --tokenizer")
        return self.tokenizer
