"""Where a model fits, how fast it would be there at best and likely, and what that costs.

Memory is the engine's own arithmetic (footprint.py). Times are floors, of bandwidth and of operations,
divided by the shares of them that steps reach (machines.toml).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hex_llm.errors import ConfigError
from hex_llm.planning.footprint import Footprint, Model, footprint
from hex_llm.planning.machines import Chip, Slice

START_FACTOR = 0.95  # where the tuning of --hbm_utilization_factor begins
TYPES = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
RULE_CHIP, RULE_GB = "v5e", 16  # of the rule by which chips are counted before anything is measured


class Load(NamedTuple):
    """What is to be served: so many requests at once, each of these lengths."""

    context: int  # the most of input and output together
    concurrency: int
    input_len: int
    output_len: int


class Figures(NamedTuple):
    """Of a model on a slice; bytes are a device's."""

    weights_bytes: int
    kv_bytes_per_token: int
    temporary_bytes: int
    usable_bytes: float
    free_bytes: float  # after the weights
    hbm_utilization_factor: float  # as much as leaves room for temporaries
    kv_tokens: int
    max_concurrency: float  # requests of the whole context that the KV cache holds
    ttft_floor_s: float  # of a lone request
    ttft_s: float
    tpot_floor_s: float  # with all requests running
    tpot_s: float
    output_tokens_per_s: float  # of all requests together; prompts are taken in between
    price_per_hour: float
    dollars_per_million_output_tokens: float


class Option(NamedTuple):
    """The model on one slice."""

    slice: Slice
    footprint: Footprint
    load: Load
    figures: Figures


class Plan(NamedTuple):
    model: Model
    load: Load
    serve_flags: Mapping[str, Any]  # as the user gave them
    fitting: Sequence[Option]  # of each chip the smallest slice, the cheapest by the hour first
    problems: Mapping[str, str]  # of every smaller slice

    @property
    def best(self) -> Option:
        return self.fitting[0]


def make_plan(model: Model, load: Load, slices: Iterable[Slice], serve_flags: Mapping[str, Any]) -> Plan:
    """`slices`: those of each chip from the smallest on. ConfigError: the model fits nowhere."""
    fitting: dict[str, Option] = {}
    problems: dict[str, str] = {}
    for one in slices:
        if one.chip.name in fitting:
            continue
        try:
            found = footprint(model, one.chip.platform, one.num_devices, one.chip.usable, load.context)
        except ConfigError as error:
            problems[one.name] = str(error)
            continue
        option = Option(one, found, load, figures_of(one, found, load))
        if problem := problem_of(option):
            problems[one.name] = problem
        else:
            fitting[one.chip.name] = option
    if not fitting:
        name, problem = list(problems.items())[-1]
        raise ConfigError(f"the model fits on none of {', '.join(problems)}; on {name}: {problem}")
    by_price = sorted(fitting.values(), key=lambda one: one.slice.price)
    return Plan(model, load, serve_flags, by_price, problems)


def problem_of(option: Option) -> str:
    """Why it does not fit; empty: it does."""
    (_, found, load, told), chip = option, option.slice.chip
    if found.has_float8 and not chip.fp8:
        return "it does not multiply floats of 8 bits, as these weights are"
    weights, usable = f"{found.weights / 1e9:.1f}", f"{chip.usable / 1e9:.1f} GB"
    expanded = "; quantized weights are expanded to floats there" if found.is_expanded else ""
    if told.free_bytes <= 0:
        return f"{weights} GB of weights on each device, which has {usable}{expanded}"
    if told.max_concurrency < 1:
        short = f"KV cache for {told.kv_tokens:,} tokens, less than one context of {load.context:,}"
        return f"{weights} of {usable} are weights: {short}{expanded}"
    if (most := found.paddings.limits.max_decode_seqs) < load.concurrency:
        return f"{most} sequences run at once, not {load.concurrency}: --max_decode_seqs changes that"
    if told.max_concurrency < load.concurrency:
        contexts = f"{told.max_concurrency:.1f} contexts of {load.context:,} tokens"
        return f"the KV cache holds {contexts}, not {load.concurrency}{expanded}"
    return ""


def figures_of(one: Slice, found: Footprint, load: Load) -> Figures:
    chip, work, num = one.chip, found.work, load.input_len
    free = chip.usable - found.weights
    spare = math.floor(100 * (1 - found.temporaries / free)) / 100 if free > 0 else 0.0
    factor = max(min(START_FACTOR, spare), 0.0)
    kv_tokens = found.kv_tokens(free * factor)
    flops = one.num_devices * chip.flops
    pairs = sum(each * min(num / 2, far) * num for far, each in work.per_pair.items())
    prefill = max((num * work.per_token + pairs) / flops, found.read_in_step(num) / chip.bandwidth)
    kept = load.concurrency * (num + load.output_len / 2) * found.per_token
    read = (found.read_in_step(load.concurrency) + kept) / chip.bandwidth
    decode = max(read, load.concurrency * (work.per_token + work.per_choice) / flops)
    ttft, tpot = prefill / chip.prefill, decode / chip.decode
    rate = load.concurrency * load.output_len / (load.concurrency * ttft + load.output_len * tpot)
    memory = (found.weights, found.per_token, found.temporaries, chip.usable, free, factor, kv_tokens)
    times = (kv_tokens / load.context, prefill, ttft, decode, tpot, rate)
    return Figures(*memory, *times, one.price, one.price / (rate * 3600) * 1e6)


def least_gb(billions: float, bits: int) -> float:
    """The rule of thumb, size × bits / 8, rounded up."""
    gb = billions * bits / 8
    return math.ceil(gb) if gb >= 2 else math.ceil(gb * 10) / 10


def rule_slice(gb: float, chip: Chip) -> Slice | None:
    """The smallest slice with more chips than the rule of thumb counts; None: there is none so large."""
    return next((one for one in chip.slices if one.num_chips > gb / RULE_GB), None)
