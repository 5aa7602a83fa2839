"""The command lines of `hex-llm bench`. A flag that vLLM has too has its name, default and meaning."""

from __future__ import annotations

import argparse
import json
import math
import re
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from hex_llm.bench.backends import DIALECTS, SAMPLING
from hex_llm.bench.datasets import DATASETS, WHOLE_ANSWERS
from hex_llm.bench.results import METRICS
from hex_llm.errors import ConfigError, one_line
from hex_llm.flags import unknown

OBJECTIVES = ("ttft", "tpot", "e2el")
T = TypeVar("T")
Flag = tuple[str, Any, Any, str]  # name; type, or argparse's options; default; help


class Parser(argparse.ArgumentParser):
    def __init__(self, command: str, about: str, arguments: str = "[flags]") -> None:
        name = f"hex-llm bench {command}"
        super().__init__(prog=name, usage=f"{name} {arguments}", description=about, allow_abbrev=False)

    def add_flags(self, title: str, flags: Sequence[Flag]) -> None:
        group = self.add_argument_group(title)
        for name, kind, default, help_text in flags:
            options = {"type": kind} if callable(kind) else kind
            shown = f"(default: {default})" if default not in (None, False, [], {}) else ""
            group.add_argument(f"--{name}", default=default, help=f"{help_text} {shown}".strip(), **options)

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """And what is no flag of this command; in names of flags, `_` is as good as `-`."""
        return self.parse_known_args(
            [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), token) for token in argv]
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(one_line(message.removeprefix("argument ")))


# ---- values


def checked(value: T, is_right: bool, problem: str) -> T:
    if not is_right:
        raise argparse.ArgumentTypeError(problem)
    return value


def count(text: str, least: int = 0) -> int:
    return checked(number := int(text), number >= least, f"must be at least {least}, not {number}")


def positive(text: str) -> int:
    return count(text, least=1)


def positive_float(text: str) -> float:
    return checked(number := float(text), number > 0, f"must be more than 0, not {text}")


def rates(text: str) -> list[float]:
    return [positive_float(one) for one in text.split(",")]


def percentiles(text: str) -> list[float]:
    numbers = [float(one) for one in text.split(",")]
    return checked(numbers, all(0 <= one <= 100 for one in numbers), f"must be from 0 to 100, not {text}")


def metrics(text: str) -> list[str]:
    names = text.split(",")
    strange = [one_line(name) for name in names if name not in METRICS]
    return checked(names, not strange, f"{', '.join(strange)} is none of {', '.join(METRICS)}")


def objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    is_right = name in OBJECTIVES and float(limit) >= 0
    return checked(
        (name, float(limit or 0)), is_right, f"must be {', '.join(OBJECTIVES)}, a colon and milliseconds"
    )


def range_ratio(text: str) -> tuple[float, float]:
    """Of prompts and of outputs."""
    by_kind = json_object(text) if "{" in text else {"input": text, "output": text}
    ratios = float(by_kind.get("input", "nan")), float(by_kind.get("output", "nan"))
    problem = 'must be at least 0 and below 1, or {"input": …, "output": …} of such'
    return checked(ratios, all(0 <= ratio < 1 for ratio in ratios), problem)


def mixture(text: str) -> dict[str, float]:
    """The share of each dataset."""
    parts = dict(one.split(":") for one in text.split(","))
    for name in parts:
        checked(
            name, name in DATASETS and name != "mixture", f"{one_line(name)} is no dataset that can be mixed"
        )
    return {name: positive_float(share) for name, share in parts.items()}


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    return checked((key.strip(), value.strip()), bool(equals), "must be KEY=VALUE")


def json_object(text: str) -> dict[str, Any]:
    return checked(value := json.loads(text), isinstance(value, dict), "must be a JSON object")


# ---- flags

SWITCH = {"action": "store_true"}
PAIRS = {"type": pair, "nargs": "*", "metavar": "KEY=VALUE"}

LENGTHS = {
    "random-input-len": 1024, "random-output-len": 128, "sonnet-input-len": 550, "sonnet-output-len": 150,
    "prefix-repetition-prefix-len": 256, "prefix-repetition-suffix-len": 256,
    "prefix-repetition-num-prefixes": 10, "prefix-repetition-output-len": 128,
}  # fmt: skip
DATASET_FLAGS: list[Flag] = [
    ("dataset-name", {"choices": list(DATASETS)}, "random", "what the prompts are"),
    ("dataset-path", str, None, "the file of sharegpt, custom or sonnet"),
    ("num-prompts", count, 1000, "requests in all; 0: as many as a custom file has"),
    ("seed", count, 0, "of prompts, lengths and arrivals"),
    ("input-len", positive, None, "prompt tokens, for any dataset whose prompts are made up"),
    ("output-len", positive, None, "output tokens, for any dataset"),
    *((name, positive, default, "") for name, default in LENGTHS.items()),
    ("random-range-ratio", range_ratio, "0.0", 'of lengths; {"input": 0.2, "output": 0.4} for two'),
    ("random-prefix-len", count, 0, "tokens that all prompts begin with"),
    ("sharegpt-output-len", positive, None, "instead of the lengths in the file"),
    ("custom-output-len", int, 256, "-1: the file's output_tokens"),
    ("sonnet-prefix-len", count, 200, "tokens of lines that all prompts begin with"),
    ("multi-turn-num-conversations", positive, 48, "that grow at the same time"),
    ("multi-turn-prefix-len", count, 1500, "tokens of the system prompt that all share"),
    ("length-scale", positive_float, 1.0, "times the lengths of chat, rag, multi-turn"),
    ("mix", mixture, "chat:0.5,rag:0.2,multi-turn:0.3", "the shares of a mixture"),
    ("disable-shuffle", SWITCH, False, "keep the order of the file"),
    ("no-oversample", SWITCH, False, "a file with too few prompts is not drawn from twice"),
    ("skip-chat-template", SWITCH, False, "custom prompts are sent as they are"),
]
CLIENT_FLAGS: dict[str, list[Flag]] = {
    "server": [
        ("backend", {"choices": list(DIALECTS)}, "openai", "the API to speak"),
        ("base-url", str, None, "instead of host and port"),
        ("host", str, "127.0.0.1", ""),
        ("port", int, None, "default: 7080, or vLLM's 8000 if nobody listens there"),
        ("endpoint", str, None, "the path; default: the backend's own"),
        ("header", PAIRS, [], ""),
        ("insecure", SWITCH, False, "do not check certificates"),
        ("model", str, None, "default: the first that the server names"),
        ("served-model-name", str, None, "the name to send, if it is not --model"),
        ("tokenizer", str, None, "a folder or a Hugging Face name; default: the server's own"),
        ("tokenizer-mode", {"choices": ["auto", "slow"]}, "auto", ""),
        ("trust-remote-code", SWITCH, False, "taken and without effect: no model's code is run"),
        ("skip-tokenizer-init", SWITCH, False, "do without a tokenizer"),
        ("request-id-prefix", str, f"bench-{uuid.uuid4().hex[:8]}-", ""),
    ],
    "dataset": DATASET_FLAGS,
    "sampling; what is not given is the server's to choose": [
        *((name.replace("_", "-"), kind, None, "") for name, kind in SAMPLING.items()),
        ("ignore-eos", SWITCH, False, "every answer has its full length; made-up prompts imply it"),
        ("extra-body", json_object, {}, "JSON, added to each request"),
    ],
    "traffic": [
        ("request-rate", rates, "inf", "requests a second; a list: one run for each"),
        ("burstiness", positive_float, 1.0, "1: Poisson; less: burstier; inf: steady"),
        ("max-concurrency", positive, None, "requests at the same time; others wait in the client"),
        ("ramp-up-strategy", {"choices": ["linear", "exponential"]}, None, ""),
        ("ramp-up-start-rps", positive_float, None, ""),
        ("ramp-up-end-rps", positive_float, None, ""),
        ("num-warmups", count, 0, "requests before the measurement"),
        ("ready-check-timeout-sec", count, 0, "wait so long for a first answer; 0: not at all"),
    ],
    "results": [
        ("percentile-metrics", metrics, "ttft,tpot,itl", f"of {', '.join(METRICS)}"),
        ("metric-percentiles", percentiles, "99", ""),
        (
            "goodput",
            {"type": objective, "nargs": "+", "metavar": "NAME:MS"},
            [],
            "what a good request keeps to",
        ),
        ("save-result", SWITCH, False, "write a JSON file"),
        ("save-detailed", SWITCH, False, "with what came of each request"),
        ("append-result", SWITCH, False, "add a line to the file"),
        ("result-dir", str, ".", ""),
        ("result-filename", str, None, "default: made of label, rate, model and time"),
        ("label", str, None, "default: the backend"),
        ("metadata", PAIRS, [], "written into the file"),
        ("plot", str, None, "a PNG file for TTFT and TPOT over the request rate"),
        ("disable-tqdm", SWITCH, False, "no progress bar"),
    ],
}


def client_parser(command: str, about: str, arguments: str = "[flags]") -> Parser:
    parser = Parser(command, about, arguments)
    for title, flags in CLIENT_FLAGS.items():
        parser.add_flags(title, flags)
    return parser


def parse_client(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of `serve` and `compare`, checked together."""
    args, rest = parser.parse(argv)
    if rest:
        raise unknown(rest[0].partition("=")[0], vars(args))
    if args.ramp_up_strategy:
        if args.request_rate != [math.inf]:
            raise ConfigError("--request-rate and --ramp-up-strategy contradict each other: give one of them")
        if not args.ramp_up_start_rps or not args.ramp_up_end_rps:
            raise ConfigError("--ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps")
    if args.plot and not {"ttft", "tpot"} <= set(args.percentile_metrics):
        raise ConfigError("--plot: needs ttft and tpot among --percentile-metrics")
    dialect = DIALECTS[args.backend]
    if args.ignore_eos and not dialect.ignores_eos:
        raise ConfigError(f"--ignore-eos: --backend {args.backend} has no such parameter")
    args.ignore_eos |= dialect.ignores_eos and args.dataset_name in WHOLE_ANSWERS
    return args
