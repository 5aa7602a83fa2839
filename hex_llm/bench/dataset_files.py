"""Prompts out of files, and lines of sonnets. A broken file is a HexError of one line."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from hex_llm.bench.samples import Sample, Source
from hex_llm.errors import HexError

SONNETS = Path(__file__).parent / "sonnets.txt"


def _text(args: argparse.Namespace) -> str:
    if not args.dataset_path:
        raise HexError(f"--dataset-name {args.dataset_name}: name its file with --dataset-path")
    try:
        return Path(args.dataset_path).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise _broken(args, getattr(error, "strerror", None) or str(error)) from error


def _rows(args: argparse.Namespace) -> list[Any]:
    """The objects in the file: of a JSON list, or one on each line."""
    text = _text(args)
    try:
        return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    except ValueError as error:
        raise _broken(args, f"neither a JSON list nor JSON lines: {error}") from error


def _broken(args: argparse.Namespace, reason: str) -> HexError:
    return HexError(f"--dataset-path {args.dataset_path}: {reason}")


def _oversampled(args: argparse.Namespace, samples: list[Sample], num: int) -> list[Sample]:
    """As many as asked for, some of them several times where there are too few."""
    if not samples:
        raise _broken(args, "no prompt in it can be used")
    if args.no_oversample:
        return samples
    rng = random.Random(args.seed)
    return samples + [replace(rng.choice(samples)) for _ in range(num - len(samples))]


def _first_turns(args: argparse.Namespace) -> list[tuple[str, str]]:
    """First question and first answer of each conversation."""
    try:
        talks = [row["conversations"] for row in _rows(args) if "conversations" in row]
        return [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) >= 2]
    except (TypeError, KeyError) as error:
        raise _broken(args, "its conversations are no lists of turns with a value") from error


def sharegpt(source: Source, num: int) -> list[Sample]:
    """Questions, and the lengths of their answers; as in vLLM, those that are tiny or long are left out."""
    args, tokenizer, samples = source.args, source.needed_tokenizer(), list[Sample]()
    fixed_len, turns = args.output_len or args.sharegpt_output_len, _first_turns(args)
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(turns)
    for question, answer in turns:
        if len(samples) == num:
            break
        prompt_len = len(tokenizer.encode(question))
        output_len = fixed_len or len(tokenizer.encode(answer))
        is_long_enough = prompt_len >= 4 and (output_len >= 4 or fixed_len)
        if is_long_enough and prompt_len <= 1024 and prompt_len + output_len <= 2048:
            samples.append(Sample(question, prompt_len, output_len))
    return _oversampled(args, samples, num)


def custom(source: Source, num: int) -> list[Sample]:
    """JSON lines with a `prompt` and, where --custom-output-len is -1, `output_tokens`."""
    args, rows = source.args, _rows(source.args)
    output_len = args.output_len or args.custom_output_len
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(rows)
    try:
        samples = [
            _custom(source, str(row["prompt"]), int(row["output_tokens"]) if output_len == -1 else output_len)
            for row in rows[: num if num > 0 else len(rows)]
        ]
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(args, f"a line lacks a prompt, or output_tokens as a number ({error})") from error
    return _oversampled(args, samples, num)


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
    text = _text(args) if args.dataset_path else SONNETS.read_text()
    lines = [line + "\n" for line in text.splitlines() if line.strip()]
    if not lines:
        raise _broken(args, "no prompt in it can be used")
    start = "Continue this poem, whose lines may stand in any order:\n"
    line_len = len(tokenizer.encode("".join(lines))) / len(lines)
    num_shared = round(args.sonnet_prefix_len / line_len)
    num_drawn = round((args.input_len or args.sonnet_input_len) / line_len) - num_shared
    samples = []
    for _ in range(num):
        prompt = "".join([start, *lines[:num_shared], *rng.choices(lines, k=max(num_drawn, 1))])
        output_len = args.output_len or args.sonnet_output_len
        samples.append(Sample(prompt, len(tokenizer.encode(prompt)), output_len))
    return samples
