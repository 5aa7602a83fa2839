"""Rows that want something, their slots and logits: what the tests of the sampler have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hex_llm.execution.sampling import SamplingRows, choose

OFF = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_k": 0,
    "num_prompt": 3,
    "num_tokens": 7,
    "num_logprobs": -1,
    "constrained": 0,
}
N, V = 32, 1152  # shared by tests, as each shape takes seconds to compile
WANTS = [  # one of each kind
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.6},
    {"repetition_penalty": 1.7},
    {"temperature": 1.0, "presence_penalty": 0.9, "frequency_penalty": -0.4},
    {"constrained": 1, "temperature": 1.0},
    {"constrained": 2},
    {"num_logprobs": 4},
]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    ids: jax.Array
    words: jax.Array
    biased: tuple[jax.Array, jax.Array]

    def history(self) -> jax.Array:
        return self.ids

    def allowed(self) -> jax.Array:
        return self.words

    def bias(self) -> tuple[jax.Array, jax.Array]:
        return self.biased


def rows_of(wants: list[dict[str, Any]], seeds: Any = None) -> SamplingRows:
    columns = {
        name: np.array(
            [want.get(name, off) for want in wants], np.float32 if isinstance(off, float) else np.int32
        )
        for name, off in OFF.items()
    }
    seeds = np.arange(len(wants)) if seeds is None else np.asarray(seeds)
    seed = np.stack([seeds * 7919, seeds + 17], axis=-1).astype(np.int32)
    return jax.tree.map(jnp.asarray, SamplingRows(seed=seed, **columns))


def slots_of(num_rows: int, vocab: int, seed: int = 0, length: int = 12) -> Slots:
    random = np.random.default_rng(seed)
    words = random.integers(-(2**31), 2**31, (num_rows, -(-vocab // 32)))
    bias_ids = np.stack([random.permutation(vocab)[:4] for _ in range(num_rows)])
    history = random.integers(0, vocab, (num_rows, length))
    history[:, 1] = bias_ids[:, 0]  # biased and penalized: the order matters
    bias_ids[:, 2] = -1
    return Slots(
        jnp.asarray(history, jnp.int32),
        jnp.asarray(words.astype(np.int32)),
        (jnp.asarray(bias_ids, jnp.int32), jnp.asarray(random.normal(0, 3, (num_rows, 4)), jnp.float32)),
    )


def logits_of(num_rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed + 100).normal(0, spread, (num_rows, vocab)), jnp.float32)


chosen = jax.jit(choose)
