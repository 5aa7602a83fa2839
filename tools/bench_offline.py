"""Output tokens per second on the embedded default model, ours beside Hugging Face transformers, in one run.

Greedy, float32, 128 tokens in and 64 out, for 1 and for 8 requests at once. Both are warmed up first.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import torch
import transformers

from hex_llm import LLM, SamplingParams
from hex_llm.config import EngineConfig
from hex_llm.weights.source import fetch

NUM_IN, NUM_OUT, REPEATS = 128, 64, 3


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1000, 40000, (count, NUM_IN), generator=generator).tolist()


def rate(run: Callable[[], object], count: int) -> float:
    """Output tokens per second: the median of some runs after one that warms up."""
    run()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return count * NUM_OUT / statistics.median(seconds)


def ours(count: int) -> float:
    llm = LLM(max_model_len=256, num_blocks=128, max_decode_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    ids = prompts(count)
    return rate(lambda: llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False), count)


def theirs(count: int) -> float:
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ids = torch.tensor(prompts(count))
    options = {"max_new_tokens": NUM_OUT, "do_sample": False, "eos_token_id": None}
    return rate(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options), count)


def main() -> int:
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"jax {jax.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    for count in (1, 8):
        mine, judge = ours(count), theirs(count)
        print(
            f"{count} at once: hex_llm {mine:.1f} tok/s, transformers {judge:.1f} tok/s, {mine / judge:.2f} x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
