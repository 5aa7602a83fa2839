"""`hex-llm plan` and `hex-llm deploy`."""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hex_llm.bench.arguments import SWITCH, Flag, Parser, positive
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.flags import read_flags
from hex_llm.planning.machines import BUILT_IN, Chip, read_machines

if TYPE_CHECKING:  # it needs jax, which a wrong flag shall not wait for
    from hex_llm.planning.plan import Plan

CONTEXT = 4096
FLAGS: list[Flag] = [
    ("max-model-len", positive, None, f"the context (default: the model's, at most {CONTEXT})"),
    ("quantization", {"choices": ["none", "int8", "int4", "fp8"]}, None, "as of `hex-llm serve`"),
    ("kv-cache-dtype", {"choices": ["auto", "bfloat16", "fp8", "int8"]}, None, "as of `hex-llm serve`"),
    ("revision", str, None, "of a model of the hub"),
    ("concurrency", positive, 16, "requests at once"),
    ("input-len", positive, 1000, "tokens of a prompt"),
    ("output-len", positive, 1000, "tokens of an answer"),
    ("on", str, None, "chips (v5e, H100) or slices (v5e-8), with commas"),
    ("machines", Path, BUILT_IN, "a file of machines and prices, like the package's machines.toml"),
    ("image", str, None, "the container's image"),
]


def parsed(command: str, about: str, argv: Sequence[str], flags: Sequence[Flag]) -> Namespace:
    parser = Parser(command, about, "MODEL [flags]", program="hex-llm")
    parser.add_argument("model", nargs="?", help="as of `hex-llm serve`; also a config.json alone")
    parser.add_flags("flags", [*FLAGS, *flags])
    parser.add_argument("--hf-token", default=os.environ.get("HF_TOKEN") or None, help="also HF_TOKEN")
    return parser.parse_all(argv)


@contextmanager
def planned(args: Namespace) -> Iterator[tuple[Plan, Mapping[str, Chip]]]:
    chips = read_machines(args.machines)
    slices = [one for chip in chips.values() for one in chip.slices]
    if args.on:
        names = args.on.lower().split(",")
        slices = [one for one in slices if {one.name.lower(), one.chip.name.lower()} & set(names)]
        known = {name for one in slices for name in (one.name.lower(), one.chip.name.lower())}
        if unheard := [name for name in names if name not in known]:
            raise ConfigError(
                f"--on={unheard[0]}: no such chip or slice; there are {', '.join(chips)}, v5e-8 …"
            )
    # jax is imported from here on; it shall find no device and look for none.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("hex_llm").setLevel(logging.ERROR)  # what is slow somewhere is not told for every slice
    from hex_llm.planning.footprint import opened_model
    from hex_llm.planning.plan import Load, make_plan

    names = ("model", "quantization", "kv_cache_dtype", "revision", "max_model_len", "hf_token")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    with opened_model(EngineConfig(**given)) as model:
        context = args.max_model_len or min(model.spec.max_len, CONTEXT)
        output_len = min(args.output_len, context // 2)
        load = Load(context, args.concurrency, min(args.input_len, context - output_len), output_len)
        yield make_plan(model, load, slices), chips


def plan(argv: Sequence[str]) -> None:
    flags: list[Flag] = [
        ("compile", SWITCH, False, "prove the memory with the TPU compiler, where libtpu is installed"),
        ("json", SWITCH, False, "print JSON"),
    ]
    args = parsed("plan", "Where a model fits, how fast it is, what it costs, what to type.", argv, flags)
    with planned(args) as (made, chips):
        from hex_llm.planning import report

        compiled = {}
        if args.compile:
            from hex_llm.planning.compile import compiled_memory

            compiled = {"compiled": compiled_memory(made.best)}
        tell = report.as_json if args.json else report.as_text
        told = tell(made, chips, args.image or report.IMAGE)
    if isinstance(told, str):
        print(told, *(f"\n# compiled\n{json.dumps(one)}" for one in compiled.values()), sep="\n")
    else:
        print(json.dumps({**told, **compiled}, indent=1))


def deploy(argv: Sequence[str]) -> None:
    """`hex-llm deploy vertex MODEL`: runs the script that --dry-run prints."""
    target, *rest = argv or ["--help"]
    if target != "vertex":
        usage = "usage: hex-llm deploy vertex MODEL [flags]; `hex-llm deploy vertex --help` lists the flags"
        if target not in ("--help", "-h"):
            raise ConfigError(f"{one_line(target)}: there is only vertex; {usage}")
        print(usage)
        return
    flags: list[Flag] = [
        ("project", str, os.environ.get("PROJECT_ID") or "PROJECT", "of Google Cloud; also PROJECT_ID"),
        ("region", str, os.environ.get("LOCATION") or "REGION", "also LOCATION"),
        ("service-account", str, None, "that the container runs as"),
        ("min-replicas", positive, 1, "of the deployment"),
        ("max-replicas", positive, 1, "of the deployment"),
        ("serve-flags", str.split, [], "further flags of the server, in quotes"),
        ("clean-up", SWITCH, False, "undeploy and delete everything after the first answer"),
        ("dry-run", SWITCH, False, "print the calls and make none"),
    ]
    args = parsed("deploy vertex", "Uploads, deploys and asks a model on Vertex AI.", rest, flags)
    read_flags(args.serve_flags)  # wrong ones are told here, not by a container that ends
    if not args.dry_run:
        for name, missing in (("project", "PROJECT"), ("region", "REGION"), ("image", None)):
            if getattr(args, name) == missing:
                raise ConfigError(f"--{name}: needs a value (deploy/README.md)")
    with planned(args) as (made, _):
        from hex_llm.planning import report

        names = ("project", "region", "service_account", "min_replicas", "max_replicas", "serve_flags")
        given = {name: getattr(args, name) for name in names} | {"image": args.image or report.IMAGE}
        token = {"HF_TOKEN": "***" if args.dry_run else args.hf_token} if args.hf_token else {}
        values = report.values_of(made, made.best, environment=token, **given)
        script = (report.TEMPLATES["vertex"] + report.TEMPLATES["clean_up"] * args.clean_up).format(**values)
    if args.dry_run:
        print(script.strip())
        return
    try:
        exec(compile(script, "vertex", "exec"), {})
    except ImportError as error:
        raise ConfigError(f"{error}: pip install google-cloud-aiplatform; --dry-run needs it not") from error
    except Exception as error:
        raise HexError(f"{type(error).__name__}: {one_line(' '.join(str(error).split())[:300])}") from error
