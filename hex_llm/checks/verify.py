"""`hex-llm verify`: a model here and in transformers, layer by layer, and the tokens of both."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hex_llm.bench.arguments import SWITCH, Flag, Parser, positive, positive_float
from hex_llm.checks import reference
from hex_llm.checks.reference import Answer, Floats
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, HexError, ModelError
from hex_llm.flags import engine_config_from_kwargs, read_flags
from hex_llm.weights.source import fetch_for

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a king who had three daughters, and",
    "def fibonacci(n):\n    ",
)
RANDOM_LEN = 24  # tokens of a prompt, of a model without a tokenizer
EXACT, ROUNDED = 1e-3, 1e-2  # differences of a layer, as parts of its size: of floats, of quantized weights


def verify(argv: Sequence[str]) -> None:
    parser = Parser(
        "verify",
        "Compares a model with transformers, layer by layer; further flags are the engine's.",
        "[MODEL] [flags]",
        program="hex-llm",
    )
    flags: list[Flag] = [
        ("reference", str, None, "what transformers reads, where that is not the model itself"),
        ("lora", str, None, "an adapter's folder, which peft judges"),
        ("prompt", {"action": "append"}, None, "a text to try; may be given several times"),
        ("num-tokens", positive, 32, "tokens of greedy search after each prompt"),
        ("tolerance", positive_float, None, f"of a layer (default: {EXACT}; quantized: {ROUNDED})"),
        ("save", Path, None, "write what transformers says to this file, and compare nothing"),
        ("against", Path, None, "compare with such a file: no transformers needed"),
        ("json", SWITCH, False, "print JSON"),
    ]
    parser.add_flags("flags", flags)
    args, rest = parser.parse(argv)
    logging.getLogger("hex_llm").setLevel(logging.ERROR)
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 256} if args.lora else {}
    given = {"dtype": "float32", **lora, **read_flags(rest).values}
    config = engine_config_from_kwargs(**given)
    expected = reference.load(args.against) if args.against else _asked(args, config)
    if args.save:
        reference.save(expected, args.save)
        print(f"{len(expected)} prompts: {args.save}")
        return
    told = compare(args, given, expected)
    print(json.dumps(told, indent=1) if args.json else as_text(told))
    if told["first_differing"] is not None or told["tokens_agreeing"] < told["tokens"]:
        raise ModelError(verdict(told))


def _asked(args: Namespace, config: EngineConfig) -> list[Answer]:
    path = fetch_for(config, args.reference or config.model)
    model = reference.load_reference(path, Path(args.lora).expanduser() if args.lora else None)
    return reference.answers_of(model, _prompts(args, config, model), args.num_tokens)


def _prompts(args: Namespace, config: EngineConfig, model: Any) -> list[list[int]]:
    from hex_llm.engine.loading import load_tokenizer, open_files

    with suppress(HexError):
        tokenizer = load_tokenizer(config, open_files(config))
        if tokenizer is not None:
            return [tokenizer.encode(text) for text in args.prompt or TEXTS]
    if args.prompt:
        raise ConfigError("--prompt: the model has no tokenizer")
    size = model.get_input_embeddings().num_embeddings
    return np.random.default_rng(0).integers(0, size, (len(TEXTS), RANDOM_LEN)).tolist()


def compare(args: Namespace, given: Mapping[str, Any], expected: Sequence[Answer]) -> dict[str, Any]:
    """`given`: the engine's flags."""
    import jax

    from hex_llm import LLM, SamplingParams

    prompts, num_tokens = [one.prompt_ids for one in expected], len(expected[0].token_ids)
    longest = max(map(len, prompts)) + num_tokens
    sizes = {"max_model_len": longest, "num_blocks": 64 + longest, "max_decode_seqs": len(expected)}
    llm = LLM(**{**given, **sizes, "skip_tokenizer_init": True})
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(None, params, prompt_token_ids=prompts, lora_request=args.lora, use_tqdm=False)
    runner = llm.engine.runner
    kinds = {leaf.dtype for leaf in jax.tree.leaves(runner.weights.layers)}
    is_quantized = any(kind.kind in "iu" or kind.itemsize == 1 for kind in kinds)
    tolerance, errors = (
        args.tolerance or (ROUNDED if is_quantized else EXACT),
        [0.0] * len(expected[0].hidden),
    )
    for one in expected:
        ours = hidden_states(runner, one.prompt_ids, adapted=bool(args.lora))
        if len(ours) != len(one.hidden):
            raise ModelError(f"the reference has {len(one.hidden) - 1} layers, not {len(ours) - 1}")
        errors = [max(e, difference(a, b)) for e, a, b in zip(errors, ours, one.hidden, strict=True)]
    pairs = zip(outputs, expected, strict=True)
    return {
        "tolerance": tolerance,
        "quantized": is_quantized,
        "differences": dict(zip(["embedding", *map(str, range(len(errors) - 1))], errors, strict=True)),
        "first_differing": next((i - 1 for i, e in enumerate(errors) if not e <= tolerance), None),
        "tokens": sum(len(one.token_ids) for one in expected),
        "tokens_agreeing": sum(_agreeing(ours.outputs[0].token_ids, one.token_ids) for ours, one in pairs),
    }


def hidden_states(runner: Any, prompt_ids: Sequence[int], *, adapted: bool = False) -> list[Floats]:
    """Of the embedded prompt, then after each layer, the last behind the final norm: by the kernels and
    weights that serve; `adapted`: with the adapter in the first slot."""
    import jax
    import jax.numpy as jnp

    from hex_llm.kernels.attention import Batch
    from hex_llm.models import decoder
    from hex_llm.models.adapters import adapt

    spec, num, block_size = runner.spec, len(prompt_ids), runner.config.block_size
    kernels = runner.context.attention_kernels, runner.context.expert_kernels
    positions, lengths = jnp.arange(num), jnp.full(num, num)
    table = jnp.arange(1, -(-num // block_size) + 1)[None]  # block 0 is padding's
    kv_slots, rows = positions + block_size, jnp.zeros(num, jnp.int32)
    chunks = 0 if num <= runner.paddings.max_single else 1
    batch = Batch(positions, rows, kv_slots, table, jnp.zeros((), jnp.int32), chunks)
    weights = runner.weights
    if adapted:
        weights = adapt(weights, runner.adapters, jnp.ones(num, jnp.int32), runner.context.adapter_kernels)
    with jax.default_matmul_precision(runner.precision):
        x = decoder.embed(spec, weights, jnp.asarray(prompt_ids))
        attended = decoder.attended(spec, weights, x, lengths, runner.pages, batch, *kernels)
        left = [
            decoder.after_layer(spec, weights, i, after, normed, kernels[1])
            for i, (after, normed, _) in enumerate(attended)
        ]
        states = [x, *(after for after, _ in left[:-1]), left[-1][1]]
    return [np.asarray(state, np.float32) for state in states]


def difference(ours: Floats, theirs: Floats) -> float:
    """The root of the mean square, as a part of theirs."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.linalg.norm(ours - theirs)) / max(float(np.linalg.norm(theirs)), 1e-30)


def _agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = zip(ours, theirs, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(theirs))


def as_text(told: dict[str, Any]) -> str:
    lines = [
        f"{name if name == 'embedding' else f'layer {name}':<10} {error:.1e}"
        + ("" if error <= told["tolerance"] else "  differs")
        for name, error in told["differences"].items()
    ]
    return "\n".join([*lines, verdict(told)])


def verdict(told: dict[str, Any]) -> str:
    first, worst = told["first_differing"], max(told["differences"].values())
    where = "the embedding" if first == -1 else f"layer {first}"
    layers = f"all layers agree within {worst:.1e} (tolerance {told['tolerance']:g})"
    if first is not None:
        error = list(told["differences"].values())[first + 1]
        layers = f"{where} is the first that differs, by {error:.1e} (tolerance {told['tolerance']:g})"
    return f"{layers}; greedy search: {told['tokens_agreeing']} of {told['tokens']} tokens are transformers'"
