"""`hex-llm plan` and `hex-llm deploy`."""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hex_llm.bench.arguments import SWITCH, Flag, Parser, positive
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, HexError, one_line
from hex_llm.flags import parse, read_flags
from hex_llm.planning.machines import BUILT_IN, Machines, read_machines

if TYPE_CHECKING:  # it needs jax, which a wrong flag shall not wait for
    from hex_llm.planning.plan import Plan

CONTEXT = 4096
PERSONAL = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HEX_LLM_CACHE")  # of the environment, whatever is planned
FOUND_OUT = ("num_hosts", "data_parallel_size", "disagg_topo", "num_blocks", "hbm_utilization_factor")
FLAGS: list[Flag] = [
    ("concurrency", positive, 16, "requests at once"),
    ("input-len", positive, 1000, "tokens of a prompt"),
    ("output-len", positive, 1000, "tokens of an answer"),
    ("on", str, None, "chips (v5e, H100) or slices (v5e-8), with commas"),
    ("machines", Path, BUILT_IN, "a file that changes prices or adds machines"),
    ("image", str, None, "the container's image"),
]


class Request(NamedTuple):
    """What a command line asks for."""

    args: Namespace
    config: EngineConfig
    serve_flags: Mapping[str, Any]  # as they were given, but not the model and nothing that is secret
    secrets: Mapping[str, str]  # by the variables of the environment that they may be in


def parsed(command: str, about: str, argv: Sequence[str], flags: Sequence[Flag]) -> Request:
    about += f" Further flags are those of `hex-llm serve` (--max_model_len: by itself at most {CONTEXT})."
    parser = Parser(command, about, "MODEL [flags]", program="hex-llm")
    parser.add_flags("flags", [*FLAGS, *flags])
    args, rest = parser.parse(argv)
    given = read_flags(rest).values
    if found_out := [name for name in FOUND_OUT if name in given]:
        raise ConfigError(f"--{found_out[0]}: a plan is of one replica, and finds that out by itself")
    config, server = parse(rest, {name: os.environ[name] for name in PERSONAL if name in os.environ})
    secrets = {"HF_TOKEN": config.hf_token, "VLLM_API_KEY": server.api_key}
    kept = {name: value for name, value in given.items() if name not in ("model", "hf_token", "api_key")}
    return Request(args, config, kept, {name: value for name, value in secrets.items() if value})


@contextmanager
def planned(request: Request) -> Iterator[tuple[Plan, Machines]]:
    args, config = request.args, request.config
    machines = read_machines(args.machines)
    slices = [one for chip in machines.chips.values() for one in chip.slices]
    if args.on:
        names = args.on.lower().split(",")
        slices = [one for one in slices if {one.name.lower(), one.chip.name.lower()} & set(names)]
        known = {name for one in slices for name in (one.name.lower(), one.chip.name.lower())}
        if unheard := [name for name in names if name not in known]:
            raise ConfigError(
                f"--on={unheard[0]}: no such chip or slice; there are {', '.join(machines.chips)}, v5e-8 …"
            )
    if size := request.serve_flags.get("tensor_parallel_size"):
        slices = [one for one in slices if one.num_devices == size]
        if not slices:
            raise ConfigError(f"--tensor_parallel_size={size}: there is no such slice of these chips")
    # jax is imported from here on; it shall find no device and look for none.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    logging.getLogger("hex_llm").setLevel(logging.ERROR)  # what is slow somewhere is not told for every slice
    from hex_llm.planning.footprint import opened_model
    from hex_llm.planning.plan import Load, make_plan

    with opened_model(config) as model:
        context = config.max_model_len or min(model.spec.max_len, CONTEXT)
        output_len = min(args.output_len, context // 2)
        load = Load(context, args.concurrency, min(args.input_len, context - output_len), output_len)
        yield make_plan(model, load, slices, request.serve_flags), machines


def plan(argv: Sequence[str]) -> None:
    flags: list[Flag] = [
        ("compile", SWITCH, False, "prove the memory with the TPU compiler, where libtpu is installed"),
        ("json", SWITCH, False, "print JSON"),
    ]
    request = parsed("plan", "Where a model fits, how fast, what it costs, what to type.", argv, flags)
    args = request.args
    with planned(request) as (made, machines):
        from hex_llm.planning import report

        compiled = {}
        if args.compile:
            from hex_llm.planning.compile import compiled_memory

            compiled = {"compiled": compiled_memory(made.best)}
        tell = report.as_json if args.json else report.as_text
        told = tell(made, machines, args.image or report.IMAGE)
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
        ("clean-up", SWITCH, False, "undeploy and delete everything after the first answer"),
        ("dry-run", SWITCH, False, "print the calls and make none"),
    ]
    request = parsed("deploy vertex", "Uploads, deploys and asks a model on Vertex AI.", rest, flags)
    args = request.args
    if not args.dry_run:
        for name, missing in (("project", "PROJECT"), ("region", "REGION"), ("image", None)):
            if getattr(args, name) == missing:
                raise ConfigError(f"--{name}: needs a value (deploy/README.md)")
    with planned(request) as (made, _):
        from hex_llm.planning import report

        names = ("project", "region", "service_account", "min_replicas", "max_replicas")
        given = {name: getattr(args, name) for name in names} | {"image": args.image or report.IMAGE}
        secrets = dict.fromkeys(request.secrets, "***") if args.dry_run else request.secrets
        values = report.values_of(made, made.best, environment=secrets, **given)
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
