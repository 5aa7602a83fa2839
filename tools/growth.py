"""How the time of a decode step grows with the context and with the batch, beside what the memory allows.

Run by `python -m tools.growth OUT.json` from the root; `python -m tools.plot_growth OUT.json docs/growth.svg`
draws it. The shape of Llama-3.1-8B with random weights and a random KV cache; single steps, made up and sent
off one after another, so the host counts only where the device waits for it. The floor: every weight and
cached token that a step must read, read once at the device's nominal bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from hex_llm import LLM
from hex_llm.execution.memory import bytes_on
from tools.gpu_common import write_model
from tools.gpu_steps import decode_plan, remember, repeated

BANDWIDTH = 4.8e12  # bytes per second, of an H200
CONTEXT = 1024  # of the batches
CONTEXTS = [1024 << i for i in range(8)]
BATCHES = [1 << i for i in range(9)]
REPEATS, ROUNDS = 20, 5


def start(folder: Path, cache: Path, tiny: bool, most: int, longest: int) -> LLM:
    write_model(folder, tiny)
    num_blocks = max(most * CONTEXT, longest) // 32
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        download_dir=str(cache),
        block_size=32,
        num_blocks=num_blocks,
        max_model_len=longest,
        max_decode_seqs=most,
    )
    runner = llm.engine.stepper.runner
    # A cache of zeros would draw less power than a real one.
    fill = jax.jit(_random_like, donate_argnums=0)
    runner.pages = [fill(page) for page in runner.pages]
    return llm


def _random_like(page: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(0), page.shape, page.dtype)


def bytes_read(llm: LLM) -> tuple[int, int]:
    """By each step, and for each token of a row's context."""
    runner, pool = llm.engine.stepper.runner, llm.engine.stepper.scheduler.pool
    weights, kv = (bytes_on(jax.local_devices()[0], each) for each in (runner.weights, runner.pages))
    # Of the table of embeddings a step reads a few rows, unless it is the head too.
    table = 0 if runner.weights.head is None else jax.tree.leaves(runner.weights.embed)[0].nbytes
    return weights - table, kv // (pool.num_blocks * pool.block_size)


def measure(llm: LLM, batches: list[int], contexts: list[int]) -> dict[str, Any]:
    """Rows of batch, context, milliseconds, and the floor's milliseconds."""
    cases = {"contexts": [(1, n) for n in contexts], "batches": [(n, CONTEXT) for n in batches]}
    fixed, per_token = bytes_read(llm)
    # The step's own token is the last of the context.
    plans = {case: decode_plan(llm, case[0], case[1] - 1) for some in cases.values() for case in some}
    began = time.perf_counter()
    print(f"compiled in {time.perf_counter() - began:.1f} s", flush=True)
    found: dict[str, Any] = {"weights_bytes": fixed, "bytes_per_token": per_token, "bandwidth": BANDWIDTH}
    found |= {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for name, some in cases.items():
        found[name] = []
        for batch, context in some:
            remember(llm, plans[batch, context], temperature=0.0)
            repeated(llm, plans[batch, context])
            seconds = [repeated(llm, plans[batch, context], REPEATS)[1] for _ in range(ROUNDS)]
            ms = statistics.median(seconds) * 1000 / REPEATS
            floor_ms = (fixed + batch * context * per_token) / BANDWIDTH * 1000
            found[name].append({"batch": batch, "context": context, "ms": ms, "floor_ms": floor_ms})
            print(
                f"batch {batch}, context {context}: {ms:.3f} ms, floor {floor_ms:.3f} ms, "
                f"{ms / floor_ms:.2f} x",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a file for the numbers, as JSON")
    parser.add_argument("--cache", type=Path, help="a folder that keeps what was compiled; else none does")
    parser.add_argument("--tiny", action="store_true", help="a small model, few and short sequences")
    options = parser.parse_args()
    batches, contexts = (BATCHES[:4], CONTEXTS[:3]) if options.tiny else (BATCHES, CONTEXTS)
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder, "cache")
        llm = start(Path(folder, "model"), cache, options.tiny, batches[-1], contexts[-1])
        options.out.write_text(json.dumps(measure(llm, batches, contexts), indent=1))


if __name__ == "__main__":
    main()
