"""Random adapters, made and judged by PEFT on transformers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from peft.utils import transformers_weight_conversion

from hex_llm.engine.engine import Engine
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import AdapterRef, Request
from tests.engine.driving import make_engine
from tests.tiny import greedy_tokens

NUM_OUT = 32
NAMES = ("a", "b", "c", "d")
# Four kinds that differ in what PEFT can say; ranks up to MAX_RANK.
MAX_RANK = 6
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
KINDS: tuple[dict[str, Any], ...] = (
    {"r": 4, "lora_alpha": 8, "targets": ("",)},
    {"r": 6, "lora_alpha": 5, "use_rslora": True,
     "targets": ("v_proj", "qkv_proj", "down_proj", "embed_tokens")},
    {"r": 2, "lora_alpha": 4, "rank_pattern": {"o_proj": 5}, "alpha_pattern": {r"layers\.1\..*o_proj": 7},
     "targets": ATTENTION},
    {"r": 1, "lora_alpha": 2, "layers_to_transform": [0], "targets": ("",)},
)  # fmt: skip


# With few shapes to compile.
FLAGS: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": MAX_RANK,
    "max_loras": 4,
    "allowed_lora_sources": "/",
    "decode_seqs_padding": 8,
    "max_num_batched_tokens": 128,
    "prefill_len_padding": 128,
}


def adapted_engine(folder: Path, **flags: Any) -> Engine:
    return make_engine(folder, **{**FLAGS, **flags})


def adapted_request(name: str, prompt: list[int], folder: Path | None, **params: Any) -> Request:
    ref = None if folder is None else AdapterRef(folder.name, str(folder))
    greedy = {"temperature": 0, "max_tokens": NUM_OUT, "ignore_eos": True}
    return Request(name, prompt, SamplingParams(**{**greedy, **params}), adapter=ref)


def targets(model: Any, ends: tuple[str, ...]) -> list[str]:
    """Whole names of the linear modules (and embeddings) that end so; "": all linear ones, and the head."""
    names = []
    for name, module in model.named_modules():
        is_text = not any(other in name for other in ("vision", "multi_modal", "router"))
        is_linear = type(module) is torch.nn.Linear
        is_named = name.rpartition(".")[2] in ends
        if is_text and (
            (is_linear and ("" in ends or is_named)) or (name.endswith("embed_tokens") and is_named)
        ):
            names.append(name)
    return names


class Judge:
    """A model with adapters by name; it is changed."""

    def __init__(self, model: Any) -> None:
        self.model, self.peft = model, None
        self._names = {ends: targets(model, ends) for ends in {kind["targets"] for kind in KINDS}}

    def add(self, name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
        """Saves a random adapter of the kind that the seed says, under a folder of this name."""
        options = {**KINDS[seed % len(KINDS)], **options}
        names = self._names[options.pop("targets")]
        if options.pop("layers_to_transform", None):
            names = [one for one in names if "layers.0." in one or "lm_head" in one]
        config = LoraConfig(**options, target_modules=names)
        # The names are whole: PEFT would take them for those of experts' fused parameters, which end alike.
        with patch.dict(transformers_weight_conversion._MOE_TARGET_MODULE_MAPPING, clear=True):
            if self.peft is None:
                self.peft = get_peft_model(self.model, config, name)
            else:
                self.peft.add_adapter(name, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.peft.modules():
                for part in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"):
                    if isinstance(module, LoraLayer) and name in getattr(module, part, ()):
                        own = getattr(module, part)[name]
                        weight = getattr(own, "weight", own)
                        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        return save(self.peft, name, folder)

    def tokens(self, name: str | None, prompt: list[int], num_tokens: int) -> list[int]:
        with self._by(name) as model:
            return greedy_tokens(model, prompt, num_tokens)

    def logprobs(self, name: str | None, prompt: list[int]) -> list[float]:
        """Of the prompt's tokens from the second on."""
        with self._by(name) as model:
            logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        return [float(logits[i, token]) for i, token in enumerate(prompt[1:])]

    @contextmanager
    def _by(self, name: str | None) -> Iterator[Any]:
        assert self.peft is not None
        self.peft.set_adapter(name or next(iter(self.peft.peft_config)))
        with torch.no_grad(), nullcontext() if name else self.peft.disable_adapter():
            self.peft(torch.tensor([[1]]))  # dynamic rope scaling remembers the longest until then
            yield self.peft


def save(peft: PeftModel, name: str, folder: Path) -> Path:
    """PEFT puts it into a folder of its name; what is there is replaced."""
    shutil.rmtree(folder / name, ignore_errors=True)
    peft.save_pretrained(folder, selected_adapters=[name])
    return folder / name
