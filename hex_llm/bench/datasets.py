"""The datasets by name; here those whose prompts are made up, with exact numbers of tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import numpy as np

from hex_llm.bench.dataset_files import custom, sharegpt, sonnet
from hex_llm.bench.samples import Sample, Source
from hex_llm.errors import HexError

LOG_SPREAD = 0.9  # sigma of the logarithms of a chat's lengths
LONGEST_CHAT = 8, 5  # times the mean, of prompts and of outputs
Lengths = list[int]


def make_samples(source: Source) -> list[Sample]:
    return DATASETS[source.args.dataset_name](source, source.args.num_prompts)


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
