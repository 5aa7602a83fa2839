"""What transformers says: the judge of greedy tokens, in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from hex_llm.config import EngineConfig
from hex_llm.weights.source import fetch


def greedy(model: Any, prompt: list[int], num_tokens: int, **options: Any) -> Any:
    """What transformers' own greedy search returns; it does not stop at the end of a sequence."""
    ids = torch.tensor([prompt])
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        **options,
    )


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    return greedy(model, prompt, num_tokens)[0, len(prompt) :].tolist()


def default_model() -> tuple[Path, Any]:
    """The GGUF file of the embedded default, and transformers' model of it."""
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    options = {"gguf_file": path.name, "dtype": torch.float32}
    return path, transformers.AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
