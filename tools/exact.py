"""The greedy tokens of the embedded default model in float32, on this machine's devices and by transformers.

Run from the root. `python -m tools.exact --write FILE` asks transformers, on the CPU, for what follows the 32
prompts; `python -m tools.exact FILE` runs them all at once and compares, maybe on another machine, which
needs neither transformers nor torch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax

from hex_llm import LLM, SamplingParams
from hex_llm.weights.model_files import open_tokenizer
from tools.prompts import PROMPTS

NUM_TOKENS = 64


def write(path: Path) -> None:
    from tools.judge import default_model, greedy_tokens

    model, judge = default_model()
    tokenizer = open_tokenizer(model)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    found = [(prompt, greedy_tokens(judge, prompt, NUM_TOKENS)) for prompt in prompts]
    path.write_text(json.dumps(found))
    print(f"{sum(len(output) for _, output in found)} tokens after {len(found)} prompts: {path}")


def compare(path: Path, dtype: str) -> int:
    """The number of prompts after which some token differs."""
    expected = json.loads(path.read_text())
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    llm = LLM(max_model_len=512, num_blocks=512, max_decode_seqs=32, dtype=dtype)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    differing = 0
    for i, (output, (prompt, tokens)) in enumerate(zip(outputs, expected, strict=True)):
        assert output.prompt_token_ids == prompt, f"prompt {i} is tokenized in another way"
        ours = output.outputs[0].token_ids
        assert len(ours) == len(tokens)
        if ours != tokens:
            differing += 1
            at = next(j for j, pair in enumerate(zip(ours, tokens, strict=True)) if pair[0] != pair[1])
            print(f"prompt {i} differs from token {at} on: {ours[at]} instead of {tokens[at]}")
    device = jax.devices()[0].device_kind
    print(
        f"{device}, jax {jax.__version__}, {dtype}: {len(expected) - differing} of {len(expected)} prompts, "
        f"{NUM_TOKENS} tokens each, have transformers' greedy tokens"
    )
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="transformers' tokens")
    parser.add_argument("--write", action="store_true", help="make that file")
    parser.add_argument("--dtype", default="float32", help="of our side")
    options = parser.parse_args()
    if options.write:
        write(options.file)
        return 0
    return int(compare(options.file, options.dtype) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
