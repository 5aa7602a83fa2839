"""From a config to an engine that runs: files, weights, memory, programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hex_llm.cluster import agreed_facts, difference, own_address, parts_of
from hex_llm.config import EngineConfig
from hex_llm.engine.engine import Engine, Stepper
from hex_llm.engine.groups import RemoteGroup, end_all, start_groups
from hex_llm.engine.separate import SeparateSteppers
from hex_llm.errors import ConfigError, ModelError
from hex_llm.execution.adapters import AdapterLayout
from hex_llm.execution.batch import Paddings
from hex_llm.execution.elsewhere import RemoteRunner
from hex_llm.execution.kernel_choice import DTYPES, FLOAT8, Devices, Kernels, choose_kernels
from hex_llm.execution.leading import LeadingRunner
from hex_llm.execution.load import free_bytes, init_weights, load_weights
from hex_llm.execution.memory import account, explained, num_kv_blocks, shown_size, token_bytes
from hex_llm.execution.messages import Joining, Loaded
from hex_llm.execution.moving import Post
from hex_llm.execution.runner import Runner, keep_compiled
from hex_llm.execution.weight_plan import EXPANDED, FORMS, WeightPlan, plan_weights, quantized_bytes
from hex_llm.kernels.gpu_float8 import can_round
from hex_llm.models.families import model_spec
from hex_llm.models.params import Weights
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.hosts import connect, devices_of, join, least, link
from hex_llm.parallel.links import Leader
from hex_llm.parallel.shardings import group_meshes, make_mesh
from hex_llm.scheduling.limits import StepLimits
from hex_llm.text.grammar import GrammarFactory
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.weights.checkpoint import Checkpoint
from hex_llm.weights.grouped import Form
from hex_llm.weights.model_files import ModelFiles, open_model, open_tokenizer
from hex_llm.weights.pooling import pooling_of
from hex_llm.weights.quantization import quantization_of
from hex_llm.weights.quantized import dequantized
from hex_llm.weights.source import fetch_for

log = logging.getLogger(__name__)


def load_engine(
    config: EngineConfig, progress: bool = False, groups: list[RemoteGroup] | None = None
) -> tuple[Engine, Tokenizer | None]:
    """Fetches, loads and, with --warmup, compiles all that requests can need. `groups`: those elsewhere, if
    they were started before."""
    groups = start_groups(config) if groups is None else groups
    try:
        return _load_engine(config, progress, groups)
    except BaseException:
        end_all(groups)  # else they would wait for another engine
        raise


def _load_engine(
    config: EngineConfig, progress: bool, groups: list[RemoteGroup]
) -> tuple[Engine, Tokenizer | None]:
    if config.num_hosts > 1:
        config = with_hosts(config)
    files = open_files(config)
    tokenizer = load_tokenizer(config, files)
    kept_in = keep_compiled(config.cache_dir)
    engine = build_engine(config, files, tokenizer, progress, kept_in, groups)
    if config.warmup:
        with explained(config, "compiling", describe_memory(engine)):
            engine.warm_up(progress)
    engine.memory = describe_memory(engine)
    log.info("%s", engine.memory)
    if (longest := engine.limits.longest) < engine.limits.max_len:
        log.warning(
            "the KV cache holds %d tokens, less than the context of %d: no request can have more "
            "(--num_blocks, --hbm_utilization_factor and a shorter --max_model_len change that)",
            longest,
            engine.limits.max_len,
        )
    return engine, tokenizer


def open_files(config: EngineConfig) -> ModelFiles:
    config_only = config.load_format == "dummy"
    path = fetch_for(config, config.model, config_only=config_only)
    return open_model(path, config_only=config_only)


def load_tokenizer(config: EngineConfig, files: ModelFiles) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None:
        return files.open_tokenizer(config.tokenizer_mode)
    return open_tokenizer(fetch_for(config, config.tokenizer, tokenizer_only=True), config.tokenizer_mode)


def build_engine(
    config: EngineConfig,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    progress: bool = False,
    kept_in: Path | None = None,
    groups: Sequence[RemoteGroup] = (),
) -> Engine:
    spec = spec_of(config, files)
    has_groups = config.disagg_topo is not None
    hosts = None if config.num_hosts == 1 or has_groups else link(config, facts_of(config, files))
    grammars = None if tokenizer is None else GrammarFactory(tokenizer, spec.vocab_size, spec.eos_ids)
    pooling = pooling_of(config, files.path, tokenizer)
    make: Callable[..., Runner] = Runner
    if isinstance(hosts, Leader):
        make = partial(LeadingRunner, hosts.send)
    build = partial(build_runner, config, files, spec, make=make, progress=progress, kept_in=kept_in)
    if has_groups:
        separate, first = build_groups(config, files, build, groups)
        return Engine(config, first[0].spec, *first, grammars, pooling, stepper=separate)
    mesh = make_mesh(config.tensor_parallel_size, None if hosts is None else devices_of(config))
    if hosts is not None:
        connect(mesh)
    runner, num_blocks = build(mesh)
    return Engine(config, runner.spec, runner, num_blocks, grammars, pooling, hosts)


Built = tuple[Runner, int]  # with the number of its blocks


def build_groups(
    config: EngineConfig,
    files: ModelFiles,
    build: Callable[[Mesh], Built],
    groups: Sequence[RemoteGroup],
) -> tuple[SeparateSteppers, Built]:
    """Those that prefill and those that decode, and the first of them, which is here. `groups` elsewhere load
    meanwhile."""
    assert config.disagg_topo is not None
    size, num_prefilling = config.tensor_parallel_size, int(config.disagg_topo.split(",")[0])
    here = [build(mesh) for mesh in group_meshes(size, config.num_groups - len(groups))]
    first = here[0][0]
    facts = {**facts_of(config, files), **facts_of_pages(first)}
    elsewhere = [remote_runner(first, facts, group) for group in groups]
    steppers = [Stepper(config, first.spec, *one) for one in (*here, *elsewhere)]
    separate = SeparateSteppers(steppers[:num_prefilling], steppers[num_prefilling:])
    if groups:
        assert config.coordinator_address is not None
        host = config.coordinator_address.rpartition(":")[0]
        runners = {i: runner for i, (runner, _) in enumerate(here)}
        post = Post(groups[0].keys, host, runners, separate.note_parcel)
        separate.connect(dict(zip(steppers[len(here) :], groups, strict=True)), post)
    return separate, here[0]


def remote_runner(like: Runner, facts: dict[str, str], group: RemoteGroup) -> tuple[RemoteRunner, int]:
    loaded = group.await_loaded()
    if found := difference(facts, loaded.facts):
        raise ConfigError(
            f"the hosts disagree: host 0 has {found[0]}, that of group {group.index} {found[1]}"
        )
    return RemoteRunner(like, loaded, group), loaded.num_blocks


def load_group(
    config: EngineConfig, joining: Joining, news: Callable[[int, bool], None]
) -> tuple[Runner, Post, Loaded]:
    """In its own process, on a host other than the first."""
    files = open_files(config)
    facts = facts_of(config, files)
    if joining.num_blocks is not None:
        config = replace(config, num_blocks=joining.num_blocks)
    mesh = make_mesh(config.tensor_parallel_size)
    kept_in = keep_compiled(config.cache_dir)
    runner, num_blocks = build_runner(config, files, spec_of(config, files), mesh, Runner, True, kept_in)
    post = Post(joining.keys, own_address(config), {joining.group: runner}, news)
    limits, max_single = runner.paddings.limits, runner.paddings.max_single
    facts |= facts_of_pages(runner)
    return runner, post, Loaded(facts, limits, max_single, num_blocks, post.url)


def build_runner(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    mesh: Mesh,
    make: Callable[..., Runner],
    progress: bool,
    kept_in: Path | None,
) -> tuple[Runner, int]:
    """With the number of its blocks."""
    devices = list(mesh.devices.flat)
    platform = str(devices[0].platform)
    dtype = resolve_dtype(config.dtype, platform)
    choice = Devices.of(config, platform, len(devices), dtype)
    if choice.kv_dtype == FLOAT8 and platform == "gpu" and not can_round():
        kind = devices[0].device_kind
        raise ConfigError(f"--kv_cache_dtype={config.kv_cache_dtype}: {kind} has no floats of 8 bits")
    held, kernels, checkpoint, plan = plan_model(config, files, spec, choice)
    weights = (
        init_weights(plan, held, mesh, dtype, config.seed)
        if checkpoint is None
        else load_weights(plan, checkpoint, mesh, dtype, progress)
    )
    log_quantized(weights, token_bytes(held, choice), dtype)
    adapters = None
    if config.enable_lora:
        first = kernels.adapter_kernels.slots_first
        layout = AdapterLayout(held, mesh, dtype, config.max_loras, config.max_lora_rank, first)
        with explained(config, "allocating the slots of adapters", "--max_loras, --max_lora_rank"):
            adapters = layout, layout.allocate()
    # What is still on its way holds memory: too little would be left for what is counted now, and the next
    # start would count other blocks, and find no program.
    weights = kernels.lay_out(weights)
    jax.block_until_ready(weights)
    limits = StepLimits.of(config, spec.max_len, platform, least(free_bytes(devices)))
    num_blocks = least(num_kv_blocks(config, limits.max_decode_seqs, held, dtype, devices))
    assert num_blocks is not None
    paddings = Paddings(config, limits, spec.max_len, kernels.max_single)
    memory = account(weights, [], None, mesh, num_blocks, config.block_size)
    with explained(config, "allocating the KV cache", memory):
        runner = make(held, weights, mesh, paddings, num_blocks, dtype, kept_in, adapters)
    return runner, num_blocks


class ModelPlan(NamedTuple):
    held: ModelSpec  # as the devices hold it
    kernels: Kernels
    checkpoint: Checkpoint | None
    weights: WeightPlan


def plan_model(config: EngineConfig, files: ModelFiles, spec: ModelSpec, choice: Devices) -> ModelPlan:
    """Which weights such devices would hold, in which form; nothing is read but headers."""
    held = spec.split_over(choice.num)
    kernels = choose_kernels(held, choice)
    checkpoint = open_checkpoint(config, files, spec)
    rounded_to = rounding(config, files, kernels)
    keeps = (lambda form, routed: False) if config.quantization == EXPANDED else kernels.can_multiply
    plan = plan_weights(held, checkpoint, choice.num, keeps, rounded_to)
    return ModelPlan(held, kernels, checkpoint, plan)


def open_checkpoint(config: EngineConfig, files: ModelFiles, spec: ModelSpec) -> Checkpoint | None:
    """What is quantized can be read as floats too. None: only the config was wanted."""
    quantization, asked = quantization_of(files.config), config.quantization
    if quantization is None:
        if asked not in (None, EXPANDED, *FORMS):
            raise ConfigError(
                f"--quantization={asked}: the model's config names no quantization; "
                f"{' and '.join(FORMS)} quantize while loading"
            )
        return files.checkpoint
    if asked not in (None, EXPANDED, quantization.method):
        raise ConfigError(
            f"--quantization={asked}, but the model's config.json says {quantization.method}: leave the "
            "flag out"
        )
    log.info("the weights are quantized by %s", quantization)
    if files.checkpoint is None:
        return None
    if spec.names.stacked_experts and any(".experts.0." in name for name in files.checkpoint):
        raise ModelError(
            f"{spec.family} with experts that {quantization.method} keeps apart is not supported"
        )
    return dequantized(files.checkpoint, quantization)


def rounding(config: EngineConfig, files: ModelFiles, kernels: Kernels) -> Form | None:
    """How plain weights are quantized: as --quantization says, or, where random ones stand for a quantized
    checkpoint's, about as those. ConfigError: there is no kernel for what is asked for."""
    quantization = quantization_of(files.config)
    if quantization is None:
        form = FORMS.get(config.quantization or "")
        if form is not None and not kernels.can_multiply(form, False):
            asked = f"--quantization={config.quantization}"
            raise ConfigError(f"{asked}: there is no kernel for it on these devices yet")
        return form
    return None if files.checkpoint is not None else quantization.schemes[0].form


def log_quantized(weights: Weights, token_bytes: int, dtype: np.dtype[Any]) -> None:
    """`token_bytes`: of keys and values on each device."""
    taken, as_floats = quantized_bytes(weights, dtype)
    if taken:
        log.info(
            "%s of matrices stay quantized: as %s they would take %s, the place of %s more tokens",
            shown_size(taken),
            dtype,
            shown_size(as_floats),
            f"{(as_floats - taken) // token_bytes:,}",
        )


def describe_memory(engine: Engine) -> str:
    runner, pool = engine.runner, engine.stepper.scheduler.pool
    in_use = ((runner.weights, runner.adapters), runner.pages, runner.temporary_bytes())
    return account(*in_use, runner.mesh, pool.num_blocks, pool.block_size)


def resolve_dtype(name: str, platform: str) -> np.dtype[Any]:
    """auto: what there are kernels for, whatever the checkpoint's is: bfloat16, but float32 on CPUs, where
    bfloat16 is many times slower."""
    if name != "auto":
        return np.dtype(DTYPES[name])
    return np.dtype(np.float32 if platform == "cpu" else jnp.bfloat16)


def with_hosts(config: EngineConfig) -> EngineConfig:
    """Joins the others. Public notebooks pass --num_hosts=4 on a single host: what fits there runs there."""
    if (parts := parts_of(config)) is not None:
        return config if parts.kind == "group" else replace(config, num_hosts=1)  # each has whole replicas
    if config.coordinator_address is not None:
        join(config)
        return config
    needed, here = config.devices_per_replica, len(jax.local_devices())
    if needed > here:
        raise ConfigError(
            f"--num_hosts={config.num_hosts}: {needed} devices are needed, and there are {here} here; where "
            "the hosts find each other must be told by --coordinator_address and --host_index"
        )
    log.warning("--num_hosts=%d: %d device(s) are enough, so one host serves", config.num_hosts, needed)
    return replace(config, num_hosts=1)


def spec_of(config: EngineConfig, files: ModelFiles) -> ModelSpec:
    return model_spec(files.config, max_model_len=config.max_model_len, sliding_window=config.sliding_window)


def facts_of_pages(runner: Runner) -> dict[str, str]:
    """What must be the same in all groups, between which pages move."""
    arrays = (f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in jax.tree.leaves(runner.pages))
    kinds = list(dict.fromkeys(arrays))  # layers differ in some models
    return {"KV pages": f"{runner.kv_dtype} {kinds}", "weights": str(runner.dtype)}


def facts_of(config: EngineConfig, files: ModelFiles) -> dict[str, str]:
    """What must be the same on all hosts of a replica."""
    model = {"--model": str(config.model), "a config.json": str(sorted(files.config.items()))}
    return {"jax": jax.__version__, **agreed_facts(config), **model}
