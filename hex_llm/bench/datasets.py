"""The prompts of a load: made up with exact numbers of tokens, or read from a file."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hex_llm.bench.backends import Prompt
from hex_llm.bench.prompts import IdPrompts, TextPrompts
from hex_llm.bench.tokenizers import SMALLEST_VOCABULARY, BenchTokenizer
from hex_llm.errors import HexError

SONNETS = Path(__file__).parent / "sonnets.txt"
LOG_SPREAD = 0.9  # sigma of the logarithms of a chat's lengths
LONGEST_CHAT = 8, 5  # times the mean, of prompts and of outputs
Lengths = list[int]


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

    def rows(self) -> list[Any]:
        """The objects in the file: of a JSON list, or one on each line."""
        text = self.text()
        try:
            return (
                list(json.loads(text))
                if text.lstrip()[:1] == "["
                else list(map(json.loads, text.splitlines()))
            )
        except (ValueError, TypeError) as error:
            raise self.broken(f"neither a JSON list nor JSON lines: {error}") from error

    def text(self) -> str:
        if not self.args.dataset_path:
            raise HexError(f"--dataset-name {self.args.dataset_name}: name its file with --dataset-path")
        try:
            return Path(self.args.dataset_path).read_text("utf-8")
        except (OSError, ValueError) as error:
            raise self.broken(getattr(error, "strerror", None) or str(error)) from error

    def broken(self, reason: str) -> HexError:
        return HexError(f"--dataset-path {self.args.dataset_path}: {reason}")

    def oversampled(self, samples: list[Sample], num: int) -> list[Sample]:
        """As many as asked for, some of them several times where there are too few."""
        if not samples:
            raise self.broken("no prompt in it can be used")
        if self.args.no_oversample:
            return samples
        rng = random.Random(self.args.seed)
        return samples + [replace(rng.choice(samples)) for _ in range(num - len(samples))]


def make_samples(source: Source) -> list[Sample]:
    return DATASETS[source.args.dataset_name](source, source.args.num_prompts)


# ---- made up


def _around(source: Source, mean: float, ratio: float, num: int) -> Lengths:
    """Even between mean * (1 - ratio) and mean * (1 + ratio); the draws are vLLM's for the same seed."""
    low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
    return [max(int(i), 1) for i in source.rng.integers(max(low, 1), high + 1, size=num)]


def random_prompts(source: Source, num: int) -> list[Sample]:
    args = source.args
    input_ratio, output_ratio = args.random_range_ratio
    input_lens = _around(source, args.input_len or args.random_input_len, input_ratio, num)
    output_lens = _around(source, args.output_len or args.random_output_len, output_ratio, num)
    return _made(source, input_lens, output_lens, args.random_prefix_len)


def _made(source: Source, input_lens: Lengths, output_lens: Lengths, prefix_len: int = 0) -> list[Sample]:
    prefix = source.prompts.extended(source.prompts.empty, prefix_len)
    return [
        Sample(source.prompts.extended(prefix, num_in), prefix_len + num_in, num_out)
        for num_in, num_out in zip(input_lens, output_lens, strict=True)
    ]


def prefix_repetition(source: Source, num: int) -> list[Sample]:
    args = source.args
    num_prefixes, prefix_len = args.prefix_repetition_num_prefixes, args.prefix_repetition_prefix_len
    if num < num_prefixes:
        raise HexError(f"--num-prompts {num} is less than --prefix-repetition-num-prefixes {num_prefixes}")
    each = num // num_prefixes
    input_lens = [args.prefix_repetition_suffix_len] * each
    output_lens = [args.output_len or args.prefix_repetition_output_len] * each
    groups = (_made(source, input_lens, output_lens, prefix_len) for _ in range(num_prefixes))
    samples = [sample for group in groups for sample in group]
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(samples)
    return samples


def _scaled(source: Source, given: int | None, usual: int) -> float:
    return max(given or usual * source.args.length_scale, 1)


def chat(source: Source, num: int) -> list[Sample]:
    """Short questions and answers with a long tail: both lengths are log-normal."""

    def lengths(mean: float, longest: int) -> Lengths:
        drawn = source.rng.lognormal(math.log(mean) - LOG_SPREAD**2 / 2, LOG_SPREAD, num)
        return [int(i) for i in np.clip(drawn.round(), 1, mean * longest)]

    means = _scaled(source, source.args.input_len, 420), _scaled(source, source.args.output_len, 220)
    input_lens, output_lens = map(lengths, means, LONGEST_CHAT)
    return _made(source, input_lens, output_lens)


def rag(source: Source, num: int) -> list[Sample]:
    """Long prompts, short answers."""
    input_lens = _around(source, _scaled(source, source.args.input_len, 3150), 0.2, num)
    output_lens = _around(source, _scaled(source, source.args.output_len, 140), 0.4, num)
    return _made(source, input_lens, output_lens)


def multi_turn(source: Source, num: int) -> list[Sample]:
    """Conversations that share a system prompt and grow, one turn of each by turns."""
    args, latest = source.args, dict[int, Sample]()
    prefix_len = round(args.multi_turn_prefix_len * args.length_scale)
    system_prompt = source.prompts.extended(source.prompts.empty, prefix_len)
    input_lens = _around(source, _scaled(source, args.input_len, 60), 0.5, num)
    output_lens = _around(source, _scaled(source, args.output_len, 80), 0.5, num)
    samples = []
    for i, (num_in, num_out) in enumerate(zip(input_lens, output_lens, strict=True)):
        previous = latest.get(i % args.multi_turn_num_conversations)
        start, start_len = (source.prompts.empty, 0) if previous else (system_prompt, prefix_len)
        sample = Sample(source.prompts.extended(start, num_in), start_len + num_in, num_out, previous)
        latest[i % args.multi_turn_num_conversations] = sample
        samples.append(sample)
    return samples


def mixture(source: Source, num: int) -> list[Sample]:
    """Of several datasets by their shares, at random; each keeps its own order."""
    names, shares = zip(*source.args.mix.items(), strict=True)
    order = source.rng.choice(len(names), size=num, p=np.array(shares) / sum(shares))
    parts: list[Iterator[Sample]] = [
        iter(DATASETS[name](source, int((order == i).sum()))) for i, name in enumerate(names)
    ]
    return [next(parts[i]) for i in order]


# ---- of files


def sharegpt(source: Source, num: int) -> list[Sample]:
    """First questions, and the lengths of their answers, of talks that vLLM keeps: neither tiny nor long."""
    tokenizer, fixed_len = (
        source.needed_tokenizer(),
        source.args.output_len or source.args.sharegpt_output_len,
    )
    talks = [
        row["conversations"] for row in source.rows() if isinstance(row, dict) and "conversations" in row
    ]
    talks = [talk for talk in talks if len(talk) >= 2]
    if not source.args.disable_shuffle:
        random.Random(source.args.seed).shuffle(talks)
    samples: list[Sample] = []
    for talk in talks:
        if len(samples) == num:
            break
        try:
            question, answer = talk[0]["value"], talk[1]["value"]
        except (TypeError, KeyError) as error:
            raise source.broken("a conversation's turn has no value") from error
        prompt_len = len(tokenizer.encode(question))
        output_len = fixed_len or len(tokenizer.encode(answer))
        is_long_enough = prompt_len >= 4 and (output_len >= 4 or fixed_len)
        if is_long_enough and prompt_len <= 1024 and prompt_len + output_len <= 2048:
            samples.append(Sample(question, prompt_len, output_len))
    return source.oversampled(samples, num)


def custom(source: Source, num: int) -> list[Sample]:
    """JSON lines with a `prompt` and, where --custom-output-len is -1, `output_tokens`."""
    rows, output_len = source.rows(), source.args.output_len or source.args.custom_output_len
    if not source.args.disable_shuffle:
        random.Random(source.args.seed).shuffle(rows)
    try:
        samples = [
            _custom(source, str(row["prompt"]), int(row["output_tokens"]) if output_len == -1 else output_len)
            for row in rows[: num if num > 0 else len(rows)]
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise source.broken(f"a line lacks a prompt, or output_tokens as a number ({error})") from error
    return source.oversampled(samples, num)


def _custom(source: Source, text: str, output_len: int) -> Sample:
    if source.tokenizer is None:
        return Sample(text, 1, output_len)
    if source.takes_ids and not source.args.skip_chat_template:
        ids = source.tokenizer.encode_chat(text)
        return Sample(ids, len(ids), output_len)
    return Sample(text, len(source.tokenizer.encode(text)), output_len)


def sonnet(source: Source, num: int) -> list[Sample]:
    """Lines of sonnets: the first are the same in all prompts, others follow at random up to the length."""
    args, tokenizer, rng = source.args, source.needed_tokenizer(), random.Random(source.args.seed)
    text = source.text() if args.dataset_path else SONNETS.read_text()
    lines = [line + "\n" for line in text.splitlines() if line.strip()]
    start = "Continue this poem, whose lines may stand in any order:\n"
    line_len = len(tokenizer.encode("".join(lines))) / max(len(lines), 1)
    num_shared = round(args.sonnet_prefix_len / line_len)
    num_drawn = round((args.input_len or args.sonnet_input_len) / line_len) - num_shared
    samples = []
    for _ in range(num):
        prompt = "".join([start, *lines[:num_shared], *rng.choices(lines, k=max(num_drawn, 1))])
        output_len = args.output_len or args.sonnet_output_len
        samples.append(Sample(prompt, len(tokenizer.encode(prompt)), output_len))
    return samples


DATASETS: dict[str, Callable[[Source, int], list[Sample]]] = {
    "random": random_prompts,
    "sharegpt": sharegpt,
    "sonnet": sonnet,
    "custom": custom,
    "prefix_repetition": prefix_repetition,
    "chat": chat,
    "rag": rag,
    "multi-turn": multi_turn,
    "mixture": mixture,
}
NEED_TEXT = ("sharegpt", "sonnet", "custom")
