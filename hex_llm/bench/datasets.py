"""Prompts: made up with exact numbers of tokens, out of files, or of the lines of sonnets."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np

from hex_llm.bench.backends import Prompt
from hex_llm.bench.tokenizers import SMALLEST_VOCABULARY, BenchTokenizer, encode_chat
from hex_llm.errors import HexError

WORDS = "the of and to in is it you that he was for on are with as his they at be this from have or by one"
TRIES = 8
SONNETS = Path(__file__).parent / "sonnets.txt"
LOG_SPREAD = 0.9  # sigma of the logarithms of a chat's lengths
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

    def token_ids(self, prompt: Prompt) -> list[int]:
        """With those that a server puts before a text; raises HexError where there is no tokenizer."""
        if isinstance(prompt, list):
            return prompt
        if self.tokenizer is None:
            name = self.args.dataset_name
            raise HexError(f"--dataset-name {name}: needs a tokenizer; name a folder with --tokenizer")
        return self.tokenizer.encode(prompt)

    def count(self, text: str) -> int:
        return len(self.token_ids(text))

    @cached_property
    def _units(self) -> list[str]:
        """Texts that are a token each: words or, in a vocabulary without words such as of bytes, letters."""
        for units in ([f" {word}" for word in WORDS.split()], list(ascii_lowercase)):
            if single := [one for one in units if self.count("a" + 3 * one) == self.count("a" + 2 * one) + 1]:
                return single
        raise HexError("the tokenizer has no token for a word or letter; prompts cannot be made up")

    def extended(self, start: Prompt | None, num_tokens: int) -> Prompt:
        """`start` and so many made-up tokens more, as ids where the backend takes them, else as text."""
        if self.takes_ids:
            return [*(start or []), *self.rng.integers(0, self.vocab_size, num_tokens).tolist()]
        text, units = str(start or ""), list[str]()
        target = (self.count(text) if start else 0) + num_tokens
        missing = num_tokens
        for _ in range(TRIES):
            if missing > 0:
                units += self.rng.choice(self._units, missing).tolist()
            elif missing < 0:
                del units[missing:]
            else:
                break
            text = str(start or "") + "".join(units)
            missing = target - self.count(text)
        return text

    def samples(self, input_lens: Lengths, output_lens: Lengths, prefix_len: int = 0) -> list[Sample]:
        """Of made-up prompts that begin with the same tokens."""
        prefix = self.extended(None, prefix_len)
        return [
            Sample(self.extended(prefix, num_in), prefix_len + num_in, num_out)
            for num_in, num_out in zip(input_lens, output_lens, strict=True)
        ]

    def around(self, mean: float, ratio: float, num: int) -> Lengths:
        """Even between mean * (1 - ratio) and mean * (1 + ratio); the draws are vLLM's for the same seed."""
        low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
        return [max(int(i), 1) for i in self.rng.integers(max(low, 1), high + 1, size=num)]

    def lognormal(self, mean: float, num: int, longest: int) -> Lengths:
        """With a long tail, cut at `longest` times the mean."""
        lengths = self.rng.lognormal(math.log(mean) - LOG_SPREAD**2 / 2, LOG_SPREAD, num)
        return [int(i) for i in np.clip(lengths.round(), 1, mean * longest)]

    def means(self, input_len: int, output_len: int) -> tuple[float, float]:
        """The given lengths, else these, scaled."""
        args, scale = self.args, self.args.length_scale
        return max(args.input_len or input_len * scale, 1), max(args.output_len or output_len * scale, 1)


def make_samples(source: Source) -> list[Sample]:
    args = source.args
    if args.dataset_name in ("sharegpt", "sonnet"):
        source.count("")  # says at once, before a file is read, that a tokenizer is missing
    return DATASETS[args.dataset_name](source, args.num_prompts)


# ---- made up


def random_prompts(source: Source, num: int) -> list[Sample]:
    args = source.args
    input_ratio, output_ratio = args.random_range_ratio
    input_lens = source.around(args.input_len or args.random_input_len, input_ratio, num)
    output_lens = source.around(args.output_len or args.random_output_len, output_ratio, num)
    return source.samples(input_lens, output_lens, args.random_prefix_len)


def prefix_repetition(source: Source, num: int) -> list[Sample]:
    args = source.args
    num_prefixes, prefix_len = args.prefix_repetition_num_prefixes, args.prefix_repetition_prefix_len
    if num < num_prefixes:
        raise HexError(f"--num-prompts {num} is less than --prefix-repetition-num-prefixes {num_prefixes}")
    input_lens = [args.prefix_repetition_suffix_len] * (num // num_prefixes)
    output_lens = [args.output_len or args.prefix_repetition_output_len] * len(input_lens)
    groups = (source.samples(input_lens, output_lens, prefix_len) for _ in range(num_prefixes))
    return _shuffled(args, [sample for group in groups for sample in group])


def chat(source: Source, num: int) -> list[Sample]:
    """Short questions and answers with a long tail."""
    input_mean, output_mean = source.means(420, 220)
    return source.samples(source.lognormal(input_mean, num, 8), source.lognormal(output_mean, num, 5))


def rag(source: Source, num: int) -> list[Sample]:
    """Long prompts, short answers."""
    input_mean, output_mean = source.means(3150, 140)
    return source.samples(source.around(input_mean, 0.2, num), source.around(output_mean, 0.4, num))


def multi_turn(source: Source, num: int) -> list[Sample]:
    """Conversations that share a system prompt and grow, one turn of each by turns."""
    args, samples = source.args, list[Sample]()
    prefix_len = round(args.multi_turn_prefix_len * args.length_scale)
    system_prompt = source.extended(None, prefix_len)
    input_lens, output_lens = (source.around(mean, 0.5, num) for mean in source.means(60, 80))
    for i, (num_in, num_out) in enumerate(zip(input_lens, output_lens, strict=True)):
        is_first = i < args.multi_turn_num_conversations
        start, start_len = (system_prompt, prefix_len) if is_first else (None, 0)
        follows = None if is_first else samples[i - args.multi_turn_num_conversations]
        samples.append(Sample(source.extended(start, num_in), start_len + num_in, num_out, follows))
    return samples


def mixture(source: Source, num: int) -> list[Sample]:
    """Of several datasets by their shares, at random; each keeps its own order."""
    names, shares = zip(*source.args.mix, strict=True)
    order = source.rng.choice(len(names), size=num, p=np.array(shares) / sum(shares))
    parts = [iter(DATASETS[name](source, int((order == i).sum()))) for i, name in enumerate(names)]
    return [next(parts[i]) for i in order]


# ---- out of files


@contextmanager
def _one_line_errors(args: argparse.Namespace, problem: str) -> Iterator[None]:
    """A broken file is a HexError; `problem` may hold {} for what Python says of it."""
    try:
        yield
    except (OSError, TypeError, KeyError, ValueError) as error:
        reason = problem.format(getattr(error, "strerror", None) or error)
        raise HexError(f"--dataset-path {args.dataset_path}: {reason}") from error


def _unusable(args: argparse.Namespace) -> HexError:
    return HexError(f"--dataset-path {args.dataset_path}: no prompt in it can be used")


def _text(args: argparse.Namespace) -> str:
    if not args.dataset_path:
        raise HexError(f"--dataset-name {args.dataset_name}: name its file with --dataset-path")
    with _one_line_errors(args, "{}"):
        return Path(args.dataset_path).read_text("utf-8")


def _rows(args: argparse.Namespace) -> list[Any]:
    """The objects in the file: of a JSON list, or one on each line."""
    text = _text(args)
    with _one_line_errors(args, "neither a JSON list nor JSON lines: {}"):
        return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


def _shuffled(args: argparse.Namespace, items: list[Any]) -> list[Any]:
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(items)
    return items


def _oversampled(args: argparse.Namespace, samples: list[Sample], num: int) -> list[Sample]:
    """As many as asked for, some of them several times where there are too few."""
    if not samples:
        raise _unusable(args)
    if args.no_oversample:
        return samples
    rng = random.Random(args.seed)
    return samples + [replace(rng.choice(samples)) for _ in range(num - len(samples))]


def sharegpt(source: Source, num: int) -> list[Sample]:
    """Questions, and the lengths of their answers; as in vLLM, those that are tiny or long are left out."""
    args, samples = source.args, list[Sample]()
    fixed_len = args.output_len or args.sharegpt_output_len
    with _one_line_errors(args, "its conversations are no lists of turns with a value"):
        talks = [row["conversations"] for row in _rows(args) if "conversations" in row]
        turns = [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) >= 2]
    for question, answer in _shuffled(args, turns):
        if len(samples) == num:
            break
        prompt_len = source.count(question)
        output_len = fixed_len or source.count(answer)
        is_long_enough = prompt_len >= 4 and (output_len >= 4 or fixed_len)
        if is_long_enough and prompt_len <= 1024 and prompt_len + output_len <= 2048:
            samples.append(Sample(question, prompt_len, output_len))
    return _oversampled(args, samples, num)


def custom(source: Source, num: int) -> list[Sample]:
    """JSON lines with a `prompt` and, where --custom-output-len is -1, `output_tokens`."""
    args, tokenizer, samples = source.args, source.tokenizer, list[Sample]()
    fixed_len, rows = args.output_len or args.custom_output_len, _shuffled(args, _rows(args))
    for row in rows[: num or None]:
        with _one_line_errors(args, "a line lacks a prompt, or output_tokens as a number ({})"):
            prompt: Prompt = str(row["prompt"])
            output_len = int(row["output_tokens"]) if fixed_len == -1 else fixed_len
        if tokenizer and source.takes_ids and not args.skip_chat_template:
            prompt = encode_chat(tokenizer, str(prompt))
        prompt_len = len(source.token_ids(prompt)) if tokenizer else 1
        samples.append(Sample(prompt, prompt_len, output_len))
    return _oversampled(args, samples, num)


def sonnet(source: Source, num: int) -> list[Sample]:
    """Lines of sonnets: the first are the same in all prompts, others follow at random up to the length."""
    args, rng = source.args, random.Random(source.args.seed)
    text = _text(args) if args.dataset_path else SONNETS.read_text("utf-8")
    lines = [line + "\n" for line in text.splitlines() if line.strip()]
    if not lines:
        raise _unusable(args)
    line_len = source.count("".join(lines)) / len(lines)
    num_shared = round(args.sonnet_prefix_len / line_len)
    num_random = round((args.input_len or args.sonnet_input_len) / line_len) - num_shared
    start = "Continue this poem, whose lines may stand in any order:\n"
    start += "".join(islice(cycle(lines), num_shared))
    samples = []
    for _ in range(num):
        prompt = start + "".join(rng.choices(lines, k=max(num_random, 1)))
        samples.append(Sample(prompt, source.count(prompt), args.output_len or args.sonnet_output_len))
    return samples


DATASETS: dict[str, Callable[[Source, int], list[Sample]]] = {
    "random": random_prompts, "sharegpt": sharegpt, "sonnet": sonnet, "custom": custom,
    "prefix_repetition": prefix_repetition, "chat": chat, "rag": rag, "multi-turn": multi_turn,
    "mixture": mixture,
}  # fmt: skip
IN_TURNS = ("multi-turn", "mixture")
WHOLE_ANSWERS = ("random", "chat", "rag", *IN_TURNS)  # imply --ignore-eos
NEED_TEXT = ("sharegpt", "sonnet", "custom")
