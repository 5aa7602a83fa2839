from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError
from hex_llm.execution.memory import CPU_SHARE, num_kv_blocks
from hex_llm.models.families import model_spec
from tests.tiny import LLAMA3, Tiny

CONFIG = Tiny("", "LlamaForCausalLM", LLAMA3).config().to_dict()
SPEC = model_spec({**CONFIG, "architectures": ["LlamaForCausalLM"]})
BLOCK_BYTES = 32 * SPEC.num_kv_heads * SPEC.head_dim * 2 * 4 * len(SPEC.layers)


def blocks(**flags: Any) -> int:
    return num_kv_blocks(EngineConfig(**flags), 256, SPEC, np.dtype(np.float32), jax.devices()[:1])


def test_the_factor_acts_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    free = int(1000 * BLOCK_BYTES / CPU_SHARE)
    monkeypatch.setattr("hex_llm.execution.memory.free_bytes", lambda devices: free)
    assert blocks(hbm_utilization_factor=1.0) == 1000 + 1  # and the padding block
    assert blocks(hbm_utilization_factor=0.5) == 500 + 1
    assert blocks(num_blocks=7) == 7 + 1
    each = SPEC.head_dim  # numbers of a key, of 4 bytes; in 8 bits they have a scale of 4 bytes
    assert blocks(hbm_utilization_factor=0.1, kv_cache_dtype="int8") == 400 * each // (each + 4) + 1
    free = BLOCK_BYTES
    with pytest.raises(ConfigError, match="no room for KV blocks"):
        blocks()
    monkeypatch.setattr("hex_llm.execution.memory.free_bytes", lambda devices: None)
    with pytest.raises(ConfigError, match="set --num_blocks"):
        blocks()
