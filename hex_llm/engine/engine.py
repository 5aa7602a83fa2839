"""Engine: schedule, run, take in the results; synchronous. Knows token ids, not text."""

from __future__ import annotations

import logging
from collections.abc import Sequence as ListLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.config import EngineConfig
from hex_llm.engine.batch import Paddings
from hex_llm.engine.memory import num_kv_blocks
from hex_llm.engine.runner import Runner
from hex_llm.errors import ConfigError, InvalidRequest
from hex_llm.models.families import model_spec
from hex_llm.models.spec import ModelSpec
from hex_llm.parallel.shardings import make_mesh
from hex_llm.scheduling.blocks import BlockPool
from hex_llm.scheduling.scheduler import Scheduler
from hex_llm.scheduling.sequence import Sequence
from hex_llm.types import SamplingParams
from hex_llm.weights.load import init_weights, load_weights
from hex_llm.weights.model_files import ModelFiles

log = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class Engine:
    def __init__(self, config: EngineConfig, files: ModelFiles, *, progress: bool = False) -> None:
        spec = model_spec(
            files.config, max_model_len=config.max_model_len, sliding_window=config.sliding_window
        )
        _check_hosts(config)
        mesh = make_mesh(config.tensor_parallel_size)
        self.spec = spec.split_over(mesh.size)
        devices = list(mesh.devices.flat)
        dtype = resolve_dtype(config.dtype, spec.dtype, devices[0].platform)
        weights = (
            init_weights(self.spec, mesh, dtype, config.seed)
            if files.checkpoint is None
            else load_weights(self.spec, files.checkpoint, mesh, dtype, progress)
        )
        num_blocks = num_kv_blocks(config, self.spec, dtype, devices)
        paddings = Paddings(config, spec.max_len)
        self.runner = Runner(self.spec, weights, mesh, paddings, num_blocks, dtype, config.enable_jit)
        pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(pool, config.max_prefill_seqs, config.max_decode_seqs)

    def prepare(self, request_id: str, prompt_ids: ListLike[int], params: SamplingParams) -> Sequence:
        """A request that can be added; what can never be served is refused before anything is allocated."""
        check_prompt(prompt_ids, self.spec)
        limit = self.spec.max_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt_ids) + params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else self.spec.eos_ids
        )
        sequence = Sequence(
            request_id, [int(i) for i in prompt_ids], params, stop_ids, limit, self.spec.recompute_len
        )
        self.scheduler.check_fits(sequence)
        return sequence

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def step(self) -> list[Sequence]:
        """One step of the model; the sequences that got a token in it. Empty: nothing is left to do."""
        plan, sequences = self.scheduler.schedule()
        if not sequences:
            return []
        log.debug("step: %d decodes, %d prefills", len(plan.decodes), len(plan.prefills))
        for sequence, token_id in zip(sequences, self.runner.run(plan), strict=True):
            sequence.append(token_id)
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
        return sequences

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every shape that a step can have."""
        self.runner.warm_up(progress)


def check_prompt(prompt_ids: ListLike[int], spec: ModelSpec) -> None:
    """JAX clamps an id out of range instead of failing, so this is the only guard."""
    if len(prompt_ids) == 0:
        raise InvalidRequest("the prompt is empty", "prompt")
    if len(prompt_ids) >= spec.max_len:
        raise InvalidRequest(
            f"the prompt has {len(prompt_ids)} tokens; prompt and output together may have {spec.max_len}",
            "prompt",
        )
    for token_id in prompt_ids:
        whole = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
        if not whole or not 0 <= token_id < spec.vocab_size:
            raise InvalidRequest(
                f"token id {token_id!r:.40} is not a whole number from 0 to {spec.vocab_size - 1}", "prompt"
            )


def resolve_dtype(asked: str, stored: str, platform: str) -> np.dtype[Any]:
    """auto: the checkpoint's own, but float32 on CPUs, where bfloat16 is many times slower."""
    if asked != "auto":
        return np.dtype(DTYPES[asked])
    if platform == "cpu":
        return np.dtype(np.float32)
    return np.dtype(jnp.float16 if stored == "float16" and platform == "gpu" else jnp.bfloat16)


def _check_hosts(config: EngineConfig) -> None:
    """Public notebooks pass --num_hosts=4 on a single host; what fits here runs here."""
    if config.num_hosts == 1:
        return
    needed, here = config.tensor_parallel_size * config.data_parallel_size, len(jax.local_devices())
    if needed > here:
        raise ConfigError(f"--num_hosts={config.num_hosts}: serving from several hosts is not built yet")
    log.warning("--num_hosts=%d: %d device(s) are enough, so one host serves", config.num_hosts, needed)
