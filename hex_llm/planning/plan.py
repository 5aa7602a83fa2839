"""Where a model fits, how fast it would be there at best and likely, and what that costs.

Memory is the engine's own arithmetic (footprint.py). Times are floors, of bandwidth and of operations,
divided by the shares of them that steps reach (machines.toml).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hex_llm.errors import ConfigError
from hex_llm.planning.footprint import Footprint, Model, footprint
from hex_llm.planning.machines import Chip, Slice

START_FACTOR = 0.95  # where the tuning of --hbm_utilization_factor begins
TYPES = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
RULE_CHIP, RULE_GB = "v5e", 16  # of the rule by which chips are counted before anything is measured


@dataclass(frozen=True)
class Load:
    """What is to be served: so many requests at once, each of these lengths."""

    context: int  # the most of input and output together
    concurrency: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Option:
    """The model on one slice."""

    slice: Slice
    footprint: Footprint
    load: Load

    @property
    def chip(self) -> Chip:
        return self.slice.chip

    @property
    def free(self) -> float:
        """Bytes of each device after the weights."""
        return self.chip.usable - self.footprint.weights

    @property
    def factor(self) -> float:
        """--hbm_utilization_factor: as much as leaves room for temporaries."""
        if self.free <= 0:
            return 0.0
        return max(
            min(START_FACTOR, math.floor(100 * (1 - self.footprint.temporaries / self.free)) / 100), 0.0
        )

    @property
    def kv_tokens(self) -> int:
        return max(int(self.free * self.factor / self.footprint.per_token), 0)

    @property
    def max_concurrency(self) -> float:
        """Requests of the whole context that the KV cache holds."""
        return self.kv_tokens / self.load.context

    @property
    def problem(self) -> str:
        """Why it does not fit; empty: it does."""
        weights, usable = self.footprint.weights / 1e9, self.chip.usable / 1e9
        if self.footprint.has_float8 and not self.chip.fp8:
            return "it does not multiply floats of 8 bits, as these weights are"
        if self.free <= 0:
            return f"{weights:.1f} GB of weights on each device, which has {usable:.1f} GB" + self._expanded
        if self.max_concurrency < 1:
            return (
                f"{weights:.1f} of {usable:.1f} GB are weights: KV cache for {self.kv_tokens:,} tokens, "
                f"less than one context of {self.load.context:,}" + self._expanded
            )
        if self.max_concurrency < self.load.concurrency:
            return (
                f"the KV cache holds {self.max_concurrency:.1f} contexts of {self.load.context:,} tokens, "
                f"not {self.load.concurrency}" + self._expanded
            )
        return ""

    @property
    def _expanded(self) -> str:
        floats = "; quantized weights are expanded to floats there"
        return floats if self.footprint.is_expanded else ""

    # ---- times

    def step_floor(self, num_rows: int) -> float:
        """Seconds of a step that decodes so many sequences."""
        work, context = self.footprint.work, self.load.input_len + self.load.output_len / 2
        kept = num_rows * context * self.footprint.per_token
        read = (self.footprint.read_in_step(num_rows) + kept) / self.chip.bandwidth
        computed = num_rows * (work.per_token + work.per_choice) / self.slice.num_devices / self.chip.flops
        return max(read, computed)

    @property
    def prefill_floor(self) -> float:
        """Seconds until one prompt is taken in."""
        work, num = self.footprint.work, self.load.input_len
        pairs = sum(each * min(num / 2, far) * num for far, each in work.per_pair.items())
        computed = (num * work.per_token + pairs) / self.slice.num_devices / self.chip.flops
        return max(computed, self.footprint.read_in_step(num) / self.chip.bandwidth)

    @cached_property
    def ttft(self) -> float:
        """Of a lone request."""
        return self.prefill_floor / self.chip.prefill

    @cached_property
    def tpot(self) -> float:
        """With all requests running."""
        return self.step_floor(self.load.concurrency) / self.chip.decode

    @property
    def output_rate(self) -> float:
        """Tokens a second of all requests together; prompts are taken in between."""
        load = self.load
        return (
            load.concurrency * load.output_len / (load.concurrency * self.ttft + load.output_len * self.tpot)
        )

    @property
    def cost(self) -> float:
        """Dollars for a million output tokens."""
        return self.slice.price / (self.output_rate * 3600) * 1e6


@dataclass(frozen=True)
class Plan:
    model: Model
    load: Load
    fitting: Sequence[Option]  # of each chip the smallest slice, the cheapest by the hour first
    problems: Mapping[str, str]  # of every smaller slice

    @property
    def best(self) -> Option:
        return self.fitting[0]


def make_plan(model: Model, load: Load, slices: Iterable[Slice]) -> Plan:
    """`slices`: those of each chip from the smallest on. ConfigError: the model fits nowhere."""
    fitting: dict[str, Option] = {}
    problems: dict[str, str] = {}
    for one in slices:
        if one.chip.name in fitting:
            continue
        try:
            found = footprint(model, one.chip.platform, one.num_devices, one.chip.usable)
        except ConfigError as error:
            problems[one.name] = str(error)
            continue
        option = Option(one, found, load)
        if option.problem:
            problems[one.name] = option.problem
        else:
            fitting[one.chip.name] = option
    if not fitting:
        name, problem = list(problems.items())[-1]
        raise ConfigError(f"the model fits on none of {', '.join(problems)}; on {name}: {problem}")
    return Plan(model, load, sorted(fitting.values(), key=lambda one: one.slice.price), problems)


def least_gb(billions: float, bits: int) -> float:
    """The rule of thumb, size × bits / 8, rounded up."""
    gb = billions * bits / 8
    return math.ceil(gb) if gb >= 2 else math.ceil(gb * 10) / 10


def rule_slice(gb: float, chip: Chip) -> Slice | None:
    """The smallest slice with more chips than the rule of thumb counts; None: there is none so large."""
    return next((one for one in chip.slices if one.num_chips > gb / RULE_GB), None)
