"""How long the embeddings of many texts take: ours, or sentence-transformers' in an environment that has it.

The folder is one of sentence-transformers', of a model without a chat template: with one it would write each
text into the template. Both are told to use the same cores by the shell (taskset).

    python -m tools.bench_embed FOLDER --out=ours.npy
    OTHER/python tools/bench_embed.py FOLDER --judge --out=theirs.npy
    python -m tools.bench_embed --compare ours.npy theirs.npy
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WORDS = "the of and a in to is was for on that with by as at from which were are be this have had not but one"
Encode = Callable[[list[str]], Any]


def texts(num: int, seed: int) -> list[str]:
    chosen, words = random.Random(seed), WORDS.split()
    return [" ".join(chosen.choices(words, k=chosen.choice((8, 16, 32, 64, 128)))) for _ in range(num)]


def ours(folder: str) -> Encode:
    from hex_llm import LLM

    llm = LLM(model=folder, dtype="float32", max_model_len=512, runner="embed", enable_prefix_cache_hbm=False)
    return lambda some: [one.outputs.embedding for one in llm.embed(some, use_tqdm=False)]


def theirs(folder: str) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder)
    return lambda some: model.encode(some, batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--judge", action="store_true", help="sentence-transformers")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--out", default="embeddings.npy")
    parser.add_argument("--compare", nargs=2)
    given = parser.parse_args()
    if given.compare:
        one, other = map(np.load, given.compare)
        print(f"they differ by at most {np.abs(one - other).max():.1e}")
        return
    encode = (theirs if given.judge else ours)(given.folder)
    encode(texts(32, seed=1))  # warms up
    before, started = sum(os.times()[:2]), time.monotonic()
    vectors = encode(texts(given.texts, seed=0))
    wall, used = time.monotonic() - started, sum(os.times()[:2]) - before
    print(f"{given.texts} texts: {wall:.1f} s, {used:.1f} s of processor time")
    np.save(given.out, np.array(vectors, np.float32))


if __name__ == "__main__":
    main()
