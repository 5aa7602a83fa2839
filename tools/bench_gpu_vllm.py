"""vLLM's side of the comparison on one GPU: the shape, workloads and prompts of tools/bench_gpu.py.

Run by an interpreter that has vLLM, from the root: `python -m tools.bench_gpu_vllm [names]`. Random weights,
no tokenizer, no network, the engine in this process; its settings besides are vLLM's own.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.gpu_common import (
    FIRST,
    QUANTIZED,
    RANK,
    SHAPES,
    WORKLOADS,
    Workload,
    await_turn,
    flags_for,
    tell_rate,
    tell_started,
    write_adapters,
    write_model,
)

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Both want a package of their own, which may not be there.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}


def generate(llm: Any, name: str, workload: Workload, adapters: list[str]) -> tuple[int, float]:
    """Tokens that came out, and seconds; requests have the adapters by turns."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts = [{"prompt_token_ids": ids} for ids in workload.prompts(name)]
    params = SamplingParams(
        temperature=workload.temperature, max_tokens=workload.num_out, ignore_eos=True, detokenize=False
    )
    own = [LoRARequest(f"a{i}", 1 + i, path) for i, path in enumerate(adapters)]
    each = [own[i % len(own)] for i in range(len(prompts))] if own else None
    began = time.perf_counter()
    results = llm.generate(prompts, params, lora_request=each, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(result.outputs[0].token_ids) for result in results), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of workloads: {', '.join(WORKLOADS)}, or none")
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens")
    parser.add_argument("--quantized", choices=QUANTIZED)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--memory", type=float, default=0.9, help="share of the GPU's")
    parser.add_argument("--pages-gib", type=float, help="of memory for pages; else what is left of its share")
    parser.add_argument("--wait", type=Path, help="for this file before anything is measured")
    options = parser.parse_args()
    os.environ.update(SETTINGS)
    import vllm

    flags = flags_for(options.tiny)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.tiny, options.quantized, options.shape)
        adapters = write_adapters(Path(folder), options.adapters, options.tiny)
        lora = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": RANK} if adapters else {}
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=flags["max_model_len"],
            max_num_seqs=flags["max_decode_seqs"],
            gpu_memory_utilization=options.memory,
            kv_cache_memory_bytes=options.pages_gib and int(options.pages_gib * 2**30),
            enable_prefix_caching=False,
            seed=0,
            **lora,
        )
        generate(llm, "first", FIRST, [])
        if adapters:
            generate(llm, "adapters", FIRST._replace(num_requests=len(adapters)), adapters)
        tell_started()
        print(f"vLLM {vllm.__version__}", flush=True)
        await_turn(options.wait)
        for name in [] if options.names == ["none"] else options.names or WORKLOADS:
            workload = WORKLOADS[name].scaled(options.tiny)
            tell_rate(name, workload, *generate(llm, name, workload, adapters))


if __name__ == "__main__":  # vLLM may start processes, which import this file
    main()
