"""What Hugging Face transformers says of a model, on the CPU in float32: the judge of ours.

transformers and torch are asked for where they are missing; what they said can be kept in a file and compared
on another machine, which needs neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hex_llm.errors import ConfigError, ModelError, one_line
from hex_llm.weights.model_files import is_gguf, read_config

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """What came of one prompt."""

    prompt_ids: list[int]
    token_ids: list[int]  # that greedy search adds
    hidden: list[
        Floats
    ]  # [T, D] of the embedded prompt, then after each layer; the last behind the final norm


def load_reference(path: Path, adapter: Path | None = None) -> Any:
    """The model that lies there, as transformers reads it. ModelError: it cannot."""
    try:
        import torch
        import transformers
    except ImportError as error:
        how = "pip install torch transformers accelerate peft"
        raise ConfigError(f"the judge is transformers, and {error.name} is not installed: {how}") from error
    logging: Any = transformers.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any
    try:
        if is_gguf(path):
            kind, folder, options = transformers.AutoModelForCausalLM, path.parent, {"gguf_file": path.name}
        else:
            name = (read_config(path).get("architectures") or ["AutoModelForCausalLM"])[0]
            kind, folder, options = getattr(transformers, name), path, {}
        model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
    except Exception as error:
        reason = one_line(" ".join(str(error).split())[:200])
        raise ModelError(
            f"transformers cannot read {path.name} ({type(error).__name__}: {reason}); name another form of "
            "the same model with --reference"
        ) from error
    return model.eval()


def greedy(model: Any, prompt: Sequence[int], num_tokens: int, **options: Any) -> Any:
    """What transformers' own greedy search returns; it does not stop at the end of a sequence."""
    import torch

    ids = torch.tensor([list(prompt)])
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        **options,
    )


def greedy_tokens(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens: list[int] = greedy(model, prompt, num_tokens)[0, len(prompt) :].tolist()
    return tokens


def answers_of(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
    import torch

    answers = []
    with torch.no_grad():
        for prompt in prompts:
            states = model(input_ids=torch.tensor([list(prompt)]), output_hidden_states=True).hidden_states
            hidden = [state[0].float().numpy() for state in states]
            answers.append(Answer(list(prompt), greedy_tokens(model, prompt, num_tokens), hidden))
    return answers


def save(answers: Sequence[Answer], path: Path) -> None:
    arrays: dict[str, Any] = {}
    for i, one in enumerate(answers):
        arrays |= {
            f"prompt{i}": one.prompt_ids,
            f"tokens{i}": one.token_ids,
            f"hidden{i}": np.stack(one.hidden),
        }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def load(path: Path) -> list[Answer]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [
                Answer(
                    arrays[f"prompt{i}"].tolist(), arrays[f"tokens{i}"].tolist(), list(arrays[f"hidden{i}"])
                )
                for i in range(len(arrays.files) // 3)
            ]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--against={path}: no file that --save has written ({error})") from error
