"""A plan told: as text, as JSON, and as the commands that carry it out."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from hex_llm.planning.machines import GPU_SHARE, Machines
from hex_llm.planning.plan import RULE_CHIP, RULE_GB, TYPES, Option, Plan, least_gb, rule_slice

TEMPLATES = tomllib.loads(Path(__file__).with_name("commands.toml").read_text())
IMAGE = "REGION-docker.pkg.dev/PROJECT/REPOSITORY/hex-llm:{platform}"
LONGEST_NAME = 40  # of a pool of nodes
COLUMNS = (
    "",
    "slice",
    "machine",
    "$/h",
    "weights",
    "KV tokens",
    "contexts",
    "TTFT",
    "TPOT",
    "tok/s",
    "$/M out",
)


def flags_of(plan: Plan, option: Option) -> list[str]:
    """What the server is to be told besides its model."""
    one = option.slice
    flags = {
        **plan.serve_flags,
        "tensor_parallel_size": one.num_devices,
        "num_hosts": one.num_hosts if one.num_hosts > 1 else None,
        "max_model_len": plan.load.context,
        "hbm_utilization_factor": option.figures.hbm_utilization_factor,
    }
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def values_of(plan: Plan, option: Option, **given: Any) -> dict[str, Any]:
    """The fields of commands.toml; `given` are those of a deployment."""
    one, chip, flags = option.slice, option.slice.chip, flags_of(plan, option)
    model = plan.model.config.model or ""
    model = "MODEL" if model.endswith(".json") else model
    name = Path(_name(plan)).name.removesuffix(".json")
    # What Google Cloud allows as the name of a machine or a pool of them.
    resource = re.sub(r"[^a-z0-9]+", "-", f"hex-{name}".lower()).strip("-")[:LONGEST_NAME].rstrip("-")
    gpu = {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(GPU_SHARE)} if chip.platform == "gpu" else {}
    environment = {
        **({"MODEL_ID": model} if model else {}),
        "DEPLOY_SOURCE": "hex-llm",
        **gpu,
        **given.pop("environment", {}),
    }
    args = ["--host=0.0.0.0", "--port=7080", *([f"--model={model}"] if model else []), *flags]
    hardware: dict[str, Any] = {"tpu_topology": one.topology} if one.num_hosts > 1 else {}
    flag = f"--tpu-topology={one.topology}" if hardware else ""
    if chip.platform == "gpu":
        hardware = {"accelerator_type": chip.accelerator, "accelerator_count": one.num_chips}
        kind = chip.accelerator.lower().replace("_", "-")
        flag = f"--accelerator=type={kind},count={one.num_chips}"
    defaults = {"project": "PROJECT", "region": "REGION", "service_account": None, "image": IMAGE}
    values = {**vars(chip), **defaults, "min_replicas": 1, "max_replicas": 1, **given}
    return values | {
        "model": f"{shlex.quote(model)} " if model else "",
        "name": name,
        "resource": resource,
        "image": values["image"].format(platform=chip.platform),
        "flags": shlex.join(flags),
        "args": args,
        "args_list": shlex.quote(",".join(args)),
        "environment": environment,
        "environment_list": shlex.quote(",".join(f"{key}={value}" for key, value in environment.items())),
        "environment_prefix": "".join(f"{key}={value} " for key, value in gpu.items()),
        "hardware": "".join(f"{key}={value!r},\n    " for key, value in hardware.items()),
        "hardware_flag": flag,
        "machine_type": one.machine_type,
        "chip": chip.name,
        "topology": one.topology,
        "num_hosts": one.num_hosts,
        "num_chips": one.num_chips,
        "manifest": "hosts" if one.num_hosts > 1 else chip.platform,
    }


def commands(plan: Plan, image: str) -> dict[str, str]:
    values, platform = values_of(plan, plan.best, image=image), plan.best.slice.chip.platform
    texts = {name: TEMPLATES[name] for name in ("serve", "vertex", "gcloud")}
    texts |= {name: TEMPLATES[name][platform] for name in ("vm", "gke")}
    return {name: text.format(**values).strip() for name, text in texts.items()}


def as_json(plan: Plan, machines: Machines, image: str) -> dict[str, Any]:
    model = plan.model
    return {
        "model": model.config.model,
        "family": model.spec.family,
        "num_parameters": model.num_params,
        "bits": model.bits,
        "max_len": model.spec.max_len,
        "least_gb": {name: least_gb(model.named_billions, bits) for name, bits in TYPES.items()},
        "steps": steps(plan, machines),
        "load": plan.load._asdict(),
        "prices": machines.prices,
        "options": [_option(plan, one) for one in plan.fitting],
        "does_not_fit": dict(plan.problems),
        "commands": commands(plan, image),
    }


def _option(plan: Plan, option: Option) -> dict[str, Any]:
    one, names = option.slice, ("name", "machine_type", "topology", "num_hosts")
    place = {name: getattr(one, name) for name in names}
    return {**place, **option.figures._asdict(), "flags": flags_of(plan, option)}


def steps(plan: Plan, machines: Machines) -> list[str]:
    """The five of Hex-LLM's documentation."""
    model, best, size = plan.model, plan.best.figures, plan.model.named_billions
    gb = least_gb(size, model.bits)
    wanted = rule_slice(gb, machines.chips[RULE_CHIP])
    by_rule = "more than the largest slice has"
    if wanted is not None:
        by_rule = f"{wanted.machine_type}, {wanted.topology}: --tensor_parallel_size={wanted.num_chips}"
    return [
        f"the model: {_name(plan)}, {model.num_params / 1e9:.2f} B parameters",
        f"memory, at least: {size:g} * ({model.bits} / 8) = {gb} GB",
        f"{RULE_CHIP} chips, by {gb} / {RULE_GB}: more than {gb / RULE_GB:.2g}; {by_rule}",
        f"the context: --max_model_len={plan.load.context}",
        f"on {plan.best.slice.name}, {best.free_bytes / 1e9:.1f} GB of each device are free for KV: "
        f"--hbm_utilization_factor={best.hbm_utilization_factor}",
    ]


def as_text(plan: Plan, machines: Machines, image: str) -> str:
    told, load = as_json(plan, machines, image), plan.load
    rows = [COLUMNS, *(_row(one, "*" if one is plan.best else "") for one in plan.fitting)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{_name(plan)}: {told['family']}, {told['num_parameters'] / 1e9:.2f} B parameters of {told['bits']} "
        f"bits, context {told['max_len']:,}",
        "weights, at least: " + ", ".join(f"{name} {gb} GB" for name, gb in told["least_gb"].items()),
        "",
        *(f"{i}. {step}" for i, step in enumerate(told["steps"], 1)),
        "",
        f"The smallest slices that fit {load.concurrency} contexts of {load.context:,} tokens. Times are "
        f"likely ones, for {load.input_len} tokens in and {load.output_len} out, {load.concurrency} at once; "
        f"weights are a device's, in GB; prices are {machines.prices}:",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
    ]
    if plan.problems:
        lines += ["", "Too small:", *(f"  {name}: {problem}" for name, problem in plan.problems.items())]
    for title, text in told["commands"].items():
        lines += ["", f"# {title}: {plan.best.slice.name}", text]
    return "\n".join(lines)


def _name(plan: Plan) -> str:
    return plan.model.config.model or "SmolLM2-135M-Instruct"


def _row(option: Option, mark: str) -> tuple[str, ...]:
    one, told = option.slice, option.figures
    return (
        mark,
        one.name,
        one.machine_type + (f" × {one.num_hosts}" if one.num_hosts > 1 else ""),
        f"{one.price:.2f}",
        f"{told.weights_bytes / 1e9:.1f}",
        f"{told.kv_tokens:,}",
        f"{int(told.max_concurrency)}",
        f"{told.ttft_s * 1e3:.0f} ms",
        f"{told.tpot_s * 1e3:.1f} ms",
        f"{told.output_tokens_per_s:,.0f}",
        f"{told.dollars_per_million_output_tokens:.2f}",
    )
