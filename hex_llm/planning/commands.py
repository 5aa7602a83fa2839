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
from hex_llm.errors import ConfigError
from hex_llm.flags import read_flags, unknown
from hex_llm.planning import vertex
from hex_llm.planning.machines import BUILT_IN, Chip, Slice, read_machines

if TYPE_CHECKING:  # it needs jax, which a wrong flag shall not wait for
    from hex_llm.planning.plan import Plan

DEFAULT_CONTEXT = 4096
MODEL_FLAGS: list[Flag] = [
    ("max-model-len", positive, None, f"the context (default: the model's, at most {DEFAULT_CONTEXT})"),
    ("quantization", {"choices": ["none", "int8", "int4", "fp8"]}, None, "as of `hex-llm serve`"),
    ("revision", str, None, "of a model of the hub"),
    ("hf-token", str, None, "for the hub; also HF_TOKEN"),
]
PLAN_FLAGS: list[Flag] = [
    ("concurrency", positive, 16, "requests at once"),
    ("input-len", positive, 1000, "tokens of a prompt"),
    ("output-len", positive, 1000, "tokens of an answer"),
    ("on", str, None, "a chip (v5e, H100) or a slice (v5e-8); several with commas"),
    ("machines", Path, BUILT_IN, "a file of machines and prices, like the package's machines.toml"),
    ("image", str, vertex.IMAGE, "the container's image"),
]


def parsed(command: str, about: str, argv: Sequence[str], flags: Sequence[Flag]) -> Namespace:
    parser = Parser(command, about, "MODEL [flags]", program="hex-llm")
    parser.add_argument("model", nargs="?", help="as of `hex-llm serve`; also a config.json alone")
    parser.add_flags("flags", [*MODEL_FLAGS, *PLAN_FLAGS, *flags])
    args, rest = parser.parse(argv)
    if rest:
        raise unknown(rest[0].partition("=")[0], vars(args))
    return args


@contextmanager
def planned(args: Namespace) -> Iterator[tuple[Plan, Mapping[str, Chip]]]:
    chips = read_machines(args.machines)
    slices = [one for chip in chips.values() for one in chip.slices]
    if args.on:
        slices = [one for name in args.on.split(",") for one in _named(name, chips)]
    # jax is imported from here on; it shall find no device and look for none.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    logging.getLogger("hex_llm").setLevel(logging.ERROR)  # kernels that are missing are told once for all
    from hex_llm.planning.footprint import opened_model
    from hex_llm.planning.plan import Load, make_plan

    names = ("model", "quantization", "revision", "max_model_len")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    token = args.hf_token or os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    with opened_model(EngineConfig(**given, hf_token=token or None)) as model:
        context = args.max_model_len or min(model.spec.max_len, DEFAULT_CONTEXT)
        output_len = min(args.output_len, context // 2)
        load = Load(context, args.concurrency, min(args.input_len, context - output_len), output_len)
        yield make_plan(model, load, slices), chips


def _named(name: str, chips: Mapping[str, Chip]) -> list[Slice]:
    found = [one for chip in chips.values() for one in chip.slices if name.lower() == one.name.lower()]
    found = found or [
        one for chip in chips.values() if chip.name.lower() == name.lower() for one in chip.slices
    ]
    if not found:
        raise ConfigError(
            f"--on={name}: no such chip or slice; there are {', '.join(chips)} and such as v5e-8"
        )
    return found


def plan(argv: Sequence[str]) -> None:
    flags: list[Flag] = [
        ("compile", SWITCH, False, "prove the memory with the TPU compiler, where libtpu is installed"),
        ("json", SWITCH, False, "print JSON"),
    ]
    args = parsed(
        "plan", "Where a model fits, how fast it is there, what it costs, and what to type.", argv, flags
    )
    with planned(args) as (made, chips):
        from hex_llm.planning import report

        compiled = None
        if args.compile:
            from hex_llm.planning.compile import compiled_memory

            compiled = compiled_memory(made.best)
        if args.json:
            told = report.as_json(made, chips, args.image)
            print(json.dumps(told if compiled is None else {**told, "compiled": compiled}, indent=1))
        else:
            print(report.as_text(made, chips, args.image))
            if compiled is not None:
                print(f"\n# compiled for {made.best.slice.name}\n{compiled['told']}")


def deploy(argv: Sequence[str]) -> None:
    """`hex-llm deploy vertex MODEL`."""
    target, *rest = argv or ["--help"]
    if target != "vertex":
        if target in ("--help", "-h"):
            print(
                "usage: hex-llm deploy vertex MODEL [flags]; `hex-llm deploy vertex --help` lists the flags"
            )
            return
        raise ConfigError(f"{target}: there is only vertex")
    flags: list[Flag] = [
        ("project", str, os.environ.get("PROJECT_ID"), "of Google Cloud; also PROJECT_ID"),
        ("region", str, os.environ.get("LOCATION"), "also LOCATION"),
        ("service-account", str, None, "that the container runs as"),
        ("min-replicas", positive, 1, "of the deployment"),
        ("max-replicas", positive, 1, "of the deployment"),
        ("serve-flags", str, "", "further flags of the server, in quotes"),
        ("clean-up", SWITCH, False, "undeploy and delete everything after the first answer"),
        ("dry-run", SWITCH, False, "print the calls and make none"),
    ]
    args = parsed("deploy vertex", "Uploads, deploys and asks a model on Vertex AI.", rest, flags)
    for name in ("project", "region"):
        if not getattr(args, name) and not args.dry_run:
            raise ConfigError(f"--{name}: needs a value; it is not in the environment either")
    read_flags(further := args.serve_flags.split())  # wrong ones are told here, not by a container that ends
    with planned(args) as (made, _):
        from hex_llm.planning import report

        where = vertex.Deployment(
            args.model or "SmolLM2-135M-Instruct",
            ["--host=0.0.0.0", f"--port={vertex.PORT}", *report.flags_of(made, made.best), *further],
            made.best.slice,
            *(args.project or "PROJECT", args.region or "REGION", args.image),
            {"HF_TOKEN": "***"} if args.hf_token and args.dry_run else {"HF_TOKEN": args.hf_token or ""},
            args.service_account,
            (args.min_replicas, max(args.min_replicas, args.max_replicas)),
        )
    calls = [*where.start(), *where.ask(), *(where.clean_up() if args.clean_up else ())]
    if args.dry_run:
        print("from google.cloud import aiplatform\n", *calls, sep="\n")
        return
    if "PROJECT/" in args.image:
        raise ConfigError("--image: name the image that you have built and pushed (deploy/README.md)")
    results = {"aiplatform": vertex.sdk()}
    vertex.make(calls, results)
    print(*results["answer"].predictions, sep="\n")
