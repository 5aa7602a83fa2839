"""Output tokens per second on the embedded default model, ours beside others', in one run on this machine.

Greedy, 128 tokens in and 64 out, and 4 in and 64 out, which is mostly decoding; the same prompts for all, for
1 and for 8 requests at once; every system is warmed up first. The others: Hugging Face transformers'
`generate`; with --vllm-python=PATH (an interpreter that has vLLM's CPU build), vLLM; with --llama-python=PATH
(one that has llama-cpp-python), llama.cpp. These multiply float32 weights, which the model's file holds
rounded to 4 and 8 bits; we and llama.cpp also the file's own, which are much less to read. Also: the host's
own time for each step, and what a cached prefix of 1,024 tokens does to the time to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import torch
import transformers

from hex_llm import LLM, SamplingParams
from hex_llm.config import EngineConfig
from hex_llm.weights.source import fetch

NUM_OUT, REPEATS = 64, 3
KINDS = [(count, num_in) for num_in in (128, 4) for count in (1, 8)]  # requests at once, tokens of a prompt
Rates = list[float]  # of the kinds


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1000, 40000, (count, length), generator=generator).tolist()


def rate(run: Callable[[], object], count: int) -> float:
    """Output tokens per second: the median of some runs after one that warms up."""
    run()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return count * NUM_OUT / statistics.median(seconds)


def ours(quantization: str | None) -> Rates:
    """`quantization`: none for float32, None for the file's own."""
    llm = LLM(
        max_model_len=256,
        num_blocks=128,
        max_decode_seqs=8,
        enable_prefix_caching=False,
        quantization=quantization,
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_OUT, ignore_eos=True)
    rates = []
    for count, num_in in KINDS:
        ids = prompts(count, num_in)
        rates.append(rate(lambda: generate(llm, ids, params), count))  # noqa: B023
        print(
            f"{count} at once, {num_in} in: our host's own time is {host_ms(llm, ids, params):.2f} ms a step"
        )
    return rates


def generate(llm: LLM, ids: list[list[int]], params: SamplingParams) -> None:
    llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)


def host_ms(llm: LLM, ids: list[list[int]], params: SamplingParams) -> float:
    """What a step costs besides waiting for the devices."""
    runner, read, waited = llm.engine.stepper.runner, llm.engine.stepper.runner.read, 0.0

    def timed(step: object) -> object:
        nonlocal waited
        start = time.perf_counter()
        jax.block_until_ready(step.choices)
        waited += time.perf_counter() - start
        return read(step)

    runner.read, before = timed, llm.engine.num_steps
    try:
        start = time.perf_counter()
        generate(llm, ids, params)
        total = time.perf_counter() - start
    finally:
        runner.read = read
    return (total - waited) * 1000 / (llm.engine.num_steps - before)


def theirs(folder: Path) -> Rates:
    """Transformers; leaves the model in the folder, for others."""
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    state = model.state_dict()  # no longer quantized, whatever its config says
    plain = transformers.AutoModelForCausalLM.from_config(_without_quantization(model.config))
    plain.load_state_dict(state)
    plain.save_pretrained(folder)
    options = {"max_new_tokens": NUM_OUT, "do_sample": False, "eos_token_id": None}
    rates = []
    for count, num_in in KINDS:
        ids = torch.tensor(prompts(count, num_in))
        whole = torch.ones_like(ids)
        rates.append(rate(lambda: model.generate(ids, attention_mask=whole, **options), count))  # noqa: B023
    return rates


def _without_quantization(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    values = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    return type(config)(**{**values, "dtype": "float32"})


VLLM = """
import json, statistics, sys, time
from vllm import LLM, SamplingParams

def main():
    folder, prompts, num_out, repeats = json.loads(sys.argv[1])
    llm = LLM(model=folder, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
              enable_prefix_caching=False, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True, detokenize=False)
    rates = []
    for ids in prompts:
        run = lambda: llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)
        run()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter(); run(); seconds.append(time.perf_counter() - start)
        rates.append(len(ids) * num_out / statistics.median(seconds))
    print("RATES", json.dumps(rates))

if __name__ == "__main__":  # it starts processes, which import this file
    main()
"""


def vllm(python: str, folder: Path) -> Rates:
    return told_by(python, VLLM, folder, [str(folder)])


# Its sequences run in one batch, as its own server runs them; a new context for each number of them.
LLAMA = """
import json, statistics, sys, time
import llama_cpp as ll
import numpy as np

def decode(context, rows):
    "The likeliest next token of each row that wants one; a row: token, position, sequence, whether it does."
    batch = ll.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, position, sequence, wants) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
    assert ll.llama_decode(context, batch) == 0
    ll.llama_batch_free(batch)
    wanted = [i for i, row in enumerate(rows) if row[3]]
    logits = [np.ctypeslib.as_array(ll.llama_get_logits_ith(context, i), (num_vocab,)) for i in wanted]
    return [int(one.argmax()) for one in logits]

def run(context, prompts, num_out):
    ll.llama_memory_clear(ll.llama_get_memory(context), True)
    last = len(prompts[0]) - 1
    ids = decode(context, [(t, p, s, p == last) for s, ids in enumerate(prompts) for p, t in enumerate(ids)])
    for position in range(last + 1, last + num_out):
        ids = decode(context, [(t, position, s, True) for s, t in enumerate(ids)])

path, whole, threads, prompts, num_out, repeats = json.loads(sys.argv[1])
ll.llama_backend_init()
if whole:
    options = ll.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = ll.LLAMA_FTYPE_ALL_F32, True, threads
    assert ll.llama_model_quantize(path.encode(), whole.encode(), options) == 0
model = ll.llama_model_load_from_file((whole or path).encode(), ll.llama_model_default_params())
num_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
rates = []
for ids in prompts:
    options = ll.llama_context_default_params()
    options.n_seq_max, options.n_ctx, options.n_batch = len(ids), 256 * len(ids), 256 * len(ids)
    options.n_threads = options.n_threads_batch = threads
    if whole:
        options.type_k = options.type_v = ll.GGML_TYPE_F32
    context = ll.llama_init_from_model(model, options)
    run(context, ids, num_out)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter(); run(context, ids, num_out); seconds.append(time.perf_counter() - start)
    rates.append(len(ids) * num_out / statistics.median(seconds))
    ll.llama_free(context)
print("RATES", json.dumps(rates))
"""


def llama_cpp(python: str, folder: Path, *, whole: bool) -> Rates:
    """`whole`: its weights and its KV cache are float32; else the weights as stored, the cache in float16."""
    path = fetch(None, cache_dir=EngineConfig().cache_dir)
    to = str(folder / "float32.gguf") if whole else ""
    return told_by(python, LLAMA, folder, [str(path), to, torch.get_num_threads()])


def told_by(python: str, program: str, folder: Path, arguments: list[object]) -> Rates:
    """The rates that a program tells, run by another interpreter with what it is to generate."""
    script = folder / "rates.py"
    script.write_text(program)
    told = json.dumps([*arguments, [prompts(*kind) for kind in KINDS], NUM_OUT, REPEATS])
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2"}  # GiB; by itself it takes half of the machine
    done = subprocess.run([python, str(script), told], capture_output=True, text=True, env=environ)
    found = [line for line in done.stdout.splitlines() if line.startswith("RATES ")]
    if not found:
        raise SystemExit(f"{python} failed:\n{done.stderr[-3000:]}")
    rates: Rates = json.loads(found[0][6:])
    return rates


def first_token_ratio() -> tuple[float, float]:
    """Seconds to the first token of a prompt of 1,056 tokens: nothing cached, and 1,024 of them cached."""
    llm = LLM(max_model_len=2048, max_decode_seqs=8, enable_prefix_cache_hbm=True)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    seconds = []
    for seed in range(REPEATS + 1):  # the first warms up
        start = prompts(1, 1024, seed)[0]
        for own in (0, 1):
            ids = [start + prompts(1, 32, 100 + own)[0]]
            begin = time.perf_counter()
            [out] = llm.generate(prompt_token_ids=ids, sampling_params=params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            assert out.num_cached_tokens == 1024 * own
    return statistics.median(seconds[2::2]), statistics.median(seconds[3::2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM's CPU build")
    parser.add_argument("--llama-python", help="an interpreter that has llama-cpp-python")
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"jax {jax.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    rates = {"hex_llm, the file's 4 and 8 bits": ours(None), "hex_llm, float32": ours("none")}
    with tempfile.TemporaryDirectory() as folder:
        rates["transformers, float32"] = theirs(Path(folder))
        if options.vllm_python is not None:
            rates["vLLM, float32"] = vllm(options.vllm_python, Path(folder))
        if options.llama_python is not None:
            for name, whole in (("float32", True), ("the file's 4 and 8 bits", False)):
                rates[f"llama.cpp, {name}"] = llama_cpp(options.llama_python, Path(folder), whole=whole)
    first_rates = next(iter(rates.values()))
    for i, (count, num_in) in enumerate(KINDS):
        print(f"{count} at once, {num_in} in:")
        for name, each in rates.items():
            print(f"    {name} {each[i]:.1f} tok/s, the first is {first_rates[i] / each[i]:.2f} x")
    first, cached = first_token_ratio()
    print(f"first token: {first:.2f} s, with 1,024 tokens cached {cached:.2f} s, {cached / first:.2f} of it")


if __name__ == "__main__":
    main()
