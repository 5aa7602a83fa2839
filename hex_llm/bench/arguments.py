"""The command lines of `hex-llm bench`. A flag that vLLM has too has its name, default and meaning."""

from __future__ import annotations

import argparse
import json
import math
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hex_llm.bench.backends import DIALECTS, SAMPLING
from hex_llm.bench.datasets import DATASETS, WHOLE_ANSWERS
from hex_llm.bench.results import METRICS
from hex_llm.errors import ConfigError, one_line
from hex_llm.flags import unknown

OBJECTIVES = ("ttft", "tpot", "e2el")
Flag = tuple[str, Any, Any, str]  # name; type, or argparse's options; default; help


class Parser(argparse.ArgumentParser):
    def __init__(
        self, command: str, about: str, arguments: str = "[flags]", program: str = "hex-llm bench"
    ) -> None:
        name = f"{program} {command}"
        super().__init__(prog=name, usage=f"{name} {arguments}", description=about, allow_abbrev=False)

    def add_flags(self, title: str, flags: Sequence[Flag]) -> None:
        group = self.add_argument_group(title)
        for name, kind, default, help_text in flags:
            options = {"type": kind} if callable(kind) else kind
            shown = f"(default: {default})" if default not in (None, False, [], {}) else ""
            group.add_argument(f"--{name}", default=default, help=f"{help_text} {shown}".strip(), **options)

    def parse(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """And what is no flag of this command; in names of flags, `_` is as good as `-`."""
        tokens = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), token) for token in argv]
        return self.parse_known_args(tokens)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """The same of a command that has all flags itself; ConfigError: one is unknown."""
        args, rest = self.parse(argv)
        if rest:
            raise unknown(rest[0].partition("=")[0], vars(args))
        return args

    def error(self, message: str) -> NoReturn:
        raise ConfigError(one_line(message.removeprefix("argument ")))


# ---- values


def kind(
    name: str, read: Callable[[str], Any], is_right: Callable[[Any], bool] | None = None, problem: str = ""
) -> Callable[[str], Any]:
    """A type for argparse; in `problem`, {0} is the text and {1} what was read."""

    def parse(text: str) -> Any:
        value = read(text)
        if is_right and not is_right(value):
            raise argparse.ArgumentTypeError(problem.format(text, value))
        return value

    parse.__name__ = name  # argparse tells it where `read` fails
    return parse


def list_of(item: Callable[[str], Any]) -> Callable[[str], Any]:
    return kind(f"list of {item.__name__}", lambda text: [item(one) for one in text.split(",")])


def named_number(text: str) -> tuple[str, float]:
    name, _, number = text.partition(":")
    return name, float(number)


def by_input_and_output(text: str) -> tuple[float, float]:
    numbers = json_object(text) if "{" in text else {"input": text, "output": text}
    return float(numbers.get("input", "nan")), float(numbers.get("output", "nan"))


count = kind("count", int, lambda number: number >= 0, "must be at least 0, not {0}")
positive = kind("positive", int, lambda number: number >= 1, "must be at least 1, not {0}")
positive_float = kind("positive_float", float, lambda number: number > 0, "must be more than 0, not {0}")
percentile = kind("percentile", float, lambda p: 0 <= p <= 100, "must be from 0 to 100, not {0}")
metric = kind("metric", str, lambda name: name in METRICS, f"{{0}} is none of {', '.join(METRICS)}")
json_object = kind("json_object", json.loads, lambda value: isinstance(value, dict), "must be a JSON object")
range_ratio = kind(
    "range_ratio",
    by_input_and_output,
    lambda ratios: all(0 <= ratio < 1 for ratio in ratios),
    'must be at least 0 and below 1, or {{"input": …, "output": …}} of such',
)
objective = kind(
    "objective",
    named_number,
    lambda limit: limit[0] in OBJECTIVES and limit[1] >= 0,
    f"must be {', '.join(OBJECTIVES)}, a colon and milliseconds",
)
share = kind(
    "share",
    named_number,
    lambda share: share[0] in DATASETS and share[0] != "mixture" and share[1] > 0,
    "{1[0]} is no dataset that can be mixed, or its share is not more than 0",
)
pair = kind(
    "pair",
    lambda text: [part.strip() for part in text.split("=", 1)],
    lambda parts: len(parts) == 2,
    "must be KEY=VALUE",
)

# ---- flags

SWITCH = {"action": "store_true"}
PAIRS = {"type": pair, "nargs": "*", "metavar": "KEY=VALUE"}
LIMITS = {"type": objective, "nargs": "+", "metavar": "NAME:MS"}
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
    ("mix", list_of(share), "chat:0.5,rag:0.2,multi-turn:0.3", "the shares of a mixture"),
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
        ("request-rate", list_of(positive_float), "inf", "requests a second; a list: one run for each"),
        ("burstiness", positive_float, 1.0, "1: Poisson; less: burstier; inf: steady"),
        ("max-concurrency", positive, None, "requests at the same time; others wait in the client"),
        ("ramp-up-strategy", {"choices": ["linear", "exponential"]}, None, ""),
        ("ramp-up-start-rps", positive_float, None, ""),
        ("ramp-up-end-rps", positive_float, None, ""),
        ("num-warmups", count, 0, "requests before the measurement"),
        ("ready-check-timeout-sec", count, 0, "wait so long for a first answer; 0: not at all"),
    ],
    "results": [
        ("percentile-metrics", list_of(metric), "ttft,tpot,itl", f"of {', '.join(METRICS)}"),
        ("metric-percentiles", list_of(percentile), "99", ""),
        ("goodput", LIMITS, [], "what a good request keeps to"),
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
    args = parser.parse_all(argv)
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
