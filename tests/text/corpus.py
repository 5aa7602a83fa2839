"""Tiny tokenizers of the shapes that our families have, trained on the spot, and texts to try them on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from hex_llm.text.tokenizer import Tokenizer

TRAINING = [
    "The quick brown fox jumps over the lazy dog. It wasn't the first time, and we'll see it again.",
    "def add(x, y):\n    if x == 10:\n        return y + 123\n    return x + y\n",
    "Hello world! hello there; the theory of the thing is that there are 12 or 1234 things.",
    "Ein naïver Mann im Café über der Straße. 日本語のテキスト and some more English text.",
    "  two spaces,   three spaces,\ttab,\n\nnew lines   at the end  ",
] * 20

TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading spaces and trailing  ",
    "\n\nnew\nlines\r\n\r\n and\ttabs",
    "the    theory   of     spaces\n    12\n  345  x",
    "don't we'll I'M they've",
    "1 12 123 1234 1234567.89",
    "naïve café Straße 日本語テキスト",
    "e\u0301 decomposed, \u00a0 no-break, \u2003 em, \u200b zero width",
    "🙂 👩‍👩‍👧 🏳️‍🌈 ᚠ \U00010348",
    "▁ the letter ▁▁ that stands for a space",
    "<s>hello</s> <s> there</s>",
    "<bos>hello<eos>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nhi<end_of_turn>\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "x<|im_end|>y <|im_end|> z",
    "<tool>  x </tool>",
    "a" * 300,
    "\x00\x01 control \x7f",
    "MiXeD CaSe-with_punctuation!?... (and) [more] {than} that",
]


LLAMA = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1}
GEMMA = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "bos_piece": "<bos>", "eos_piece": "<eos>"} | {
    "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "▁▁", "▁▁▁", "▁▁▁▁"],
    "add_dummy_prefix": False,
}


def train_byte_level(pre: Any, special: Sequence[str], size: int = 600) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def train_sentencepiece(path: Path, *, gemma: bool = False, kind: str = "bpe") -> Path:
    """tokenizer.model as Llama 2 has it, or as Gemma."""
    own = GEMMA if gemma else LLAMA
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING),
        model_prefix=str(path.with_suffix("")),
        model_type=kind,
        vocab_size=520 if kind == "bpe" else 350,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
        **own,
    )
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def bos_id(tokenizer: Tokenizer) -> int | None:
    """The token that begins a text, if there is one."""
    return tokenizer.codec.token_id(tokenizer.special_tokens.get("bos_token", ""))
