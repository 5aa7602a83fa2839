"""The command lines of `hex-llm bench`. A flag that vLLM has too has its name, default and meaning."""

from __future__ import annotations

import argparse
import json
import math
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

from hex_llm.bench.backends import DIALECTS
from hex_llm.bench.datasets import DATASETS
from hex_llm.errors import ConfigError, one_line
from hex_llm.flags import unknown

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
OBJECTIVES = ("ttft", "tpot", "e2el")


class Parser(argparse.ArgumentParser):
    def __init__(self, command: str, about: str) -> None:
        name = f"hex-llm bench {command}"
        super().__init__(prog=name, usage=f"{name} [flags]", description=about, allow_abbrev=False)

    def format_help(self) -> str:
        for action in self._actions:
            if action.default not in (None, False, [], {}, argparse.SUPPRESS):
                action.help = f"{action.help or ''} (default: {action.default})".lstrip()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(one_line(message.removeprefix("argument ")))

    def names(self) -> list[str]:
        """Every flag, as `hex_llm.flags` writes them."""
        return [name[2:].replace("-", "_") for name in self._option_string_actions if name[:2] == "--"]


def with_dashes(argv: Sequence[str]) -> list[str]:
    """The command line with `-` for each `_` in its flags."""
    split = (token.partition("=") for token in argv)
    return [
        (name.replace("_", "-") if name.startswith("--") else name) + equals + value
        for name, equals, value in split
    ]


# ---- values


def count(text: str, least: int = 0) -> int:
    if (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {number}")
    return number


def positive(text: str) -> int:
    return count(text, least=1)


def positive_float(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be more than 0, not {text}")
    return number


def rates(text: str) -> list[float]:
    return [positive_float(one) for one in text.split(",")]


def percentiles(text: str) -> list[float]:
    numbers = [float(one) for one in text.split(",")]
    if not all(0 <= number <= 100 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be from 0 to 100, not {text}")
    return numbers


def metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{one_line(name)} is none of {', '.join(METRICS)}")
    return names


def objective(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in OBJECTIVES or not float(limit) >= 0:
        raise argparse.ArgumentTypeError(f"must be {', '.join(OBJECTIVES)}, a colon and milliseconds")
    return name, float(limit)


def range_ratio(text: str) -> tuple[float, float]:
    """Of prompts and of outputs."""
    by_kind = json_object(text) if "{" in text else {"input": text, "output": text}
    ratios = float(by_kind.get("input", "nan")), float(by_kind.get("output", "nan"))
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise argparse.ArgumentTypeError(
            'must be at least 0 and below 1, or {"input": …, "output": …} of such'
        )
    return ratios


def mixture(text: str) -> dict[str, float]:
    """The share of each dataset."""
    parts = dict(one.split(":") for one in text.split(","))
    for name in parts:
        if name not in DATASETS or name == "mixture":
            raise argparse.ArgumentTypeError(f"{one_line(name)} is no dataset that can be mixed")
    return {name: positive_float(share) for name, share in parts.items()}


def pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key.strip(), value.strip()


def json_object(text: str) -> dict[str, Any]:
    if not isinstance(value := json.loads(text), dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


# ---- flags


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", default="random", choices=list(DATASETS), help="what the prompts are")
    add("--dataset-path", help="the file of sharegpt, custom or sonnet")
    add("--num-prompts", type=count, default=1000, help="requests in all; 0: as many as a custom file has")
    add("--seed", type=count, default=0, help="of prompts, lengths and arrivals")
    add("--input-len", type=positive, help="prompt tokens, for any dataset whose prompts are made up")
    add("--output-len", type=positive, help="output tokens, for any dataset")
    add("--random-input-len", type=positive, default=1024)
    add("--random-output-len", type=positive, default=128)
    add("--random-range-ratio", type=range_ratio, default="0.0",
        help='lengths vary by this share of themselves; {"input": 0.2, "output": 0.4} for two')  # fmt: skip
    add("--random-prefix-len", type=count, default=0, help="tokens that all prompts begin with")
    add("--sharegpt-output-len", type=positive, help="instead of the lengths in the file")
    add("--custom-output-len", type=int, default=256, help="-1: the file's output_tokens")
    add("--sonnet-input-len", type=positive, default=550)
    add("--sonnet-output-len", type=positive, default=150)
    add("--sonnet-prefix-len", type=count, default=200, help="tokens of lines that all prompts begin with")
    add("--prefix-repetition-prefix-len", type=positive, default=256)
    add("--prefix-repetition-suffix-len", type=positive, default=256)
    add("--prefix-repetition-num-prefixes", type=positive, default=10)
    add("--prefix-repetition-output-len", type=positive, default=128)
    add("--multi-turn-num-conversations", type=positive, default=48, help="that grow at the same time")
    add(
        "--multi-turn-prefix-len", type=count, default=1500, help="tokens of the system prompt that all share"
    )
    add("--length-scale", type=positive_float, default=1.0, help="times the lengths of chat, rag, multi-turn")
    add("--mix", type=mixture, default="chat:0.5,rag:0.2,multi-turn:0.3", help="the shares of a mixture")
    add("--disable-shuffle", action="store_true", help="keep the order of the file")
    add("--no-oversample", action="store_true", help="a file with too few prompts is not drawn from twice")
    add("--skip-chat-template", action="store_true", help="custom prompts are sent as they are")


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--backend", default="openai", choices=list(DIALECTS), help="the API to speak")
    add("--base-url", help="instead of host and port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, help="default: 7080, or vLLM's 8000 if nobody listens there")
    add("--endpoint", help="the path; default: the backend's own")
    add("--header", type=pair, nargs="*", default=[], metavar="KEY=VALUE")
    add("--insecure", action="store_true", help="do not check certificates")
    add("--model", help="default: the first that the server names")
    add("--served-model-name", help="the name to send, if it is not --model")
    add("--tokenizer", help="a folder or a Hugging Face name; default: the server's own")
    add("--tokenizer-mode", default="auto", choices=["auto", "slow"])
    add("--trust-remote-code", action="store_true", help="taken and without effect: no model's code is run")
    add("--skip-tokenizer-init", action="store_true", help="do without a tokenizer")
    add("--request-id-prefix", default=f"bench-{uuid.uuid4().hex[:8]}-")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sampling; what is not given is the server's to choose").add_argument
    for name in (
        "temperature",
        "top-p",
        "min-p",
        "frequency-penalty",
        "presence-penalty",
        "repetition-penalty",
    ):
        add(f"--{name}", type=float)
    add("--top-k", type=int)
    add("--logprobs", type=int)
    add(
        "--ignore-eos", action="store_true", help="every answer has its full length; made-up prompts imply it"
    )
    add("--extra-body", type=json_object, default={}, help="JSON, added to each request")


def add_traffic_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traffic").add_argument
    add("--request-rate", type=rates, default="inf", help="requests a second; a list: one run for each")
    add("--burstiness", type=positive_float, default=1.0, help="1: Poisson; less: burstier; inf: steady")
    add("--max-concurrency", type=positive, help="requests at the same time; others wait in the client")
    add("--ramp-up-strategy", choices=["linear", "exponential"])
    add("--ramp-up-start-rps", type=positive_float)
    add("--ramp-up-end-rps", type=positive_float)
    add("--num-warmups", type=count, default=0, help="requests before the measurement")
    add(
        "--ready-check-timeout-sec",
        type=count,
        default=0,
        help="wait so long for a first answer; 0: not at all",
    )


def add_result_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--percentile-metrics", type=metrics, default="ttft,tpot,itl", help=f"of {', '.join(METRICS)}")
    add("--metric-percentiles", type=percentiles, default="99")
    add("--goodput", type=objective, nargs="+", metavar="NAME:MS", help="what a good request keeps to")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with what came of each request")
    add("--append-result", action="store_true", help="add a line to the file")
    add("--result-dir", help="default: the current folder")
    add("--result-filename", help="default: made of label, rate, model and time")
    add("--label", help="default: the backend")
    add("--metadata", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="written into the file")
    add("--plot", metavar="FILE.png", help="TTFT and TPOT over the request rate")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def client_parser(command: str, about: str) -> Parser:
    parser = Parser(command, about)
    for add_flags in (
        add_server_flags, add_dataset_flags, add_sampling_flags, add_traffic_flags, add_result_flags
    ):  # fmt: skip
        add_flags(parser)
    return parser


def parse_client(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of `serve` and `compare`, checked together."""
    args, rest = parser.parse_known_args(with_dashes(argv))
    if rest:
        raise unknown(rest[0].partition("=")[0], parser.names())
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
    args.ignore_eos |= dialect.ignores_eos and args.dataset_name in (
        "random", "chat", "rag", "multi-turn", "mixture"
    )  # fmt: skip
    return args
