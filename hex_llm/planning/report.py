"""A plan told: as text, as JSON, and as the commands that carry it out."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from typing import Any

from hex_llm.planning.machines import GPU_SHARE, Chip
from hex_llm.planning.plan import RULE_CHIP, RULE_GB, TYPES, Option, Plan, least_gb, rule_slice
from hex_llm.planning.vertex import PORT, Deployment

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
    config = plan.model.config
    flags = {
        "tensor_parallel_size": option.slice.num_devices,
        "num_hosts": option.slice.num_hosts if option.slice.num_hosts > 1 else None,
        "max_model_len": plan.load.context,
        "hbm_utilization_factor": option.factor,
        "quantization": config.quantization,
        "revision": config.revision,
    }
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def as_json(plan: Plan, chips: Mapping[str, Chip], image: str) -> dict[str, Any]:
    model = plan.model
    return {
        "model": model.config.model,
        "family": model.spec.family,
        "num_parameters": model.num_params,
        "bits": model.bits,
        "max_len": model.spec.max_len,
        "least_gb": {name: least_gb(model.named_billions, bits) for name, bits in TYPES.items()},
        "steps": steps(plan, chips),
        "load": vars(plan.load),
        "options": [_option(plan, one) for one in plan.fitting],
        "does_not_fit": dict(plan.problems),
        "commands": commands(plan, plan.best, image),
    }


def _option(plan: Plan, option: Option) -> dict[str, Any]:
    found = option.footprint
    return {
        "slice": option.slice.name,
        "machine_type": option.slice.machine_type,
        "topology": option.slice.topology,
        "num_hosts": option.slice.num_hosts,
        "price_per_hour": option.slice.price,
        "weights_bytes": found.weights,
        "kv_bytes_per_token": found.per_token,
        "temporary_bytes": found.temporaries,
        "usable_bytes": option.chip.usable,
        "kv_tokens": option.kv_tokens,
        "max_concurrency": option.max_concurrency,
        "ttft_s": {"floor": option.prefill_floor, "likely": option.ttft},
        "tpot_s": {"floor": option.step_floor(plan.load.concurrency), "likely": option.tpot},
        "output_tokens_per_s": option.output_rate,
        "dollars_per_million_output_tokens": option.cost,
        "flags": flags_of(plan, option),
    }


def steps(plan: Plan, chips: Mapping[str, Chip]) -> list[str]:
    """The five of Hex-LLM's documentation."""
    model, size = plan.model, plan.model.named_billions
    gb = least_gb(size, model.bits)
    wanted = rule_slice(gb, chips[RULE_CHIP]) if RULE_CHIP in chips else None
    by_rule = "more than the largest slice has"
    if wanted is not None:
        by_rule = f"{wanted.machine_type}, {wanted.topology}: --tensor_parallel_size={wanted.num_chips}"
    best = plan.best
    return [
        f"the model: {_name(plan)}, {model.num_params / 1e9:.2f} B parameters",
        f"memory, at least: {size:g} * ({model.bits} / 8) = {gb} GB",
        f"{RULE_CHIP} chips, by {gb} / {RULE_GB}: more than {gb / RULE_GB:.2g}; {by_rule}",
        f"the context: --max_model_len={plan.load.context}",
        f"on {best.slice.name}, {_gb(best.free)} GB of each device are free for the KV cache: "
        f"--hbm_utilization_factor={best.factor}",
    ]


def commands(plan: Plan, option: Option, image: str) -> dict[str, str]:
    model, flags = plan.model.config.model or "", flags_of(plan, option)
    model = "MODEL" if model.endswith(".json") else model
    where = Deployment(model or _name(plan), flags, option.slice, image=image)
    serve = shlex.join(["hex-llm", "serve", *([model] if model else []), *flags])
    if option.chip.platform == "gpu":
        serve = f"XLA_PYTHON_CLIENT_MEM_FRACTION={GPU_SHARE} {serve}"
    vertex = ["from google.cloud import aiplatform", *map(str, [*where.start(), *where.ask()])]
    return {
        "serve": serve,
        "vertex": "\n".join(vertex),
        "gcloud": _gcloud(where),
        "vm": _vm(option),
        "gke": _gke(option),
    }


def _gcloud(where: Deployment) -> str:
    upload = where.start()[1].arguments
    environment = ",".join(f"{name}={value}" for name, value in where.container_environment.items())
    args = ",".join(upload["serving_container_args"])
    command = ",".join(upload["serving_container_command"])
    machine = f"--machine-type={where.slice.machine_type}"
    if where.slice.chip.platform == "gpu":
        kind = where.slice.chip.accelerator.lower().replace("_", "-")
        machine += f" --accelerator=type={kind},count={where.slice.num_chips}"
    elif where.slice.num_hosts > 1:
        machine += f" --tpu-topology={where.slice.topology}"
    lines = [
        f"gcloud ai models upload --region={where.region} --display-name={where.name}",
        f"  --container-image-uri={upload['serving_container_image_uri']} --container-command={command}",
        f"  --container-args={shlex.quote(args)}",
        f"  --container-ports={PORT} --container-predict-route=/generate --container-health-route=/ping",
        f"  --container-env-vars={shlex.quote(environment)}",
    ]
    create = f"gcloud ai endpoints create --region={where.region} --display-name={where.name}-endpoint"
    deploy = f"gcloud ai endpoints deploy-model ENDPOINT --region={where.region} --model=MODEL"
    deploy += f" --display-name={where.name} {machine}"
    return "\n".join([" \\\n".join(lines), create, deploy])


def _vm(option: Option) -> str:
    one, zone = option.slice, option.chip.zone
    if option.chip.platform == "gpu":
        return f"gcloud compute instances create hex-llm --zone={zone} --machine-type={one.machine_type}"
    kind = f"--type={option.chip.name} --topology={one.topology}"
    return f"gcloud alpha compute tpus tpu-vm create hex-llm {kind} --zone={zone} --version=RUNTIME"


def _gke(option: Option) -> str:
    one = option.slice
    pool = f"gcloud container node-pools create hex-llm --cluster=CLUSTER --node-locations={option.chip.zone}"
    pool += f" --machine-type={one.machine_type} --num-nodes={one.num_hosts}"
    if option.chip.platform == "gpu":
        pool += f" --accelerator=type={option.chip.gke},count={one.num_chips}"
    elif one.num_hosts > 1:
        pool += f" --tpu-topology={one.topology}"
    manifest = "hosts" if one.num_hosts > 1 else option.chip.platform
    return f"{pool}\nkubectl apply -k deploy/kubernetes/{manifest}"


def as_text(plan: Plan, chips: Mapping[str, Chip], image: str) -> str:
    model, load = plan.model, plan.load
    sizes = ", ".join(f"{name} {least_gb(model.named_billions, bits)} GB" for name, bits in TYPES.items())
    rows = [COLUMNS, *(_row(plan, one) for one in plan.fitting)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    told = [
        f"{_name(plan)}: {model.spec.family}, {model.num_params / 1e9:.2f} B parameters of {model.bits} "
        f"bits, context {model.spec.max_len:,}",
        f"weights, at least: {sizes}",
        "",
        *(f"{i}. {step}" for i, step in enumerate(steps(plan, chips), 1)),
        "",
        f"The smallest slices that fit {load.concurrency} contexts of {load.context:,} tokens. Times are "
        f"likely ones, for {load.input_len} tokens in and {load.output_len} out, {load.concurrency} at once; "
        "weights are a device's, in GB:",
        *table,
    ]
    if plan.problems:
        told += ["", "Too small:", *(f"  {name}: {problem}" for name, problem in plan.problems.items())]
    for title, text in commands(plan, plan.best, image).items():
        told += ["", f"# {title}: {plan.best.slice.name}", text]
    return "\n".join(told)


def _name(plan: Plan) -> str:
    return plan.model.config.model or "SmolLM2-135M-Instruct"


def _row(plan: Plan, option: Option) -> tuple[str, ...]:
    return (
        "*" if option is plan.best else "",
        option.slice.name,
        option.slice.machine_type + (f" × {option.slice.num_hosts}" if option.slice.num_hosts > 1 else ""),
        f"{option.slice.price:.2f}",
        _gb(option.footprint.weights),
        f"{option.kv_tokens:,}",
        f"{math.floor(option.max_concurrency)}",
        f"{option.ttft * 1e3:.0f} ms",
        f"{option.tpot * 1e3:.1f} ms",
        f"{option.output_rate:,.0f}",
        f"{option.cost:.2f}",
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"
