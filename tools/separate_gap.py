"""How long running streams wait for their next token while prompts of maximum length come, with prefill and
decode together and apart (--disagg_topo=1,1), on virtual devices or, where there are two, on real ones:

    python -m tools.separate_gap [--max_len=2048] [--streams=8] [--prompts=8] [--processes]

Prints the median and the 99th percentile of the gaps without and with the prompts. On CPUs both groups of
devices share the cores, so that a prefill slows decodes down whoever schedules them. With --processes each
group has a process and a core of its own, as on two hosts, and what computes gives way to what schedules.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import quantiles

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

from hex_llm import SamplingParams
from hex_llm.config import EngineConfig
from hex_llm.engine.engine import Engine
from hex_llm.engine.loading import load_engine
from hex_llm.frontend.devices import variables_of
from hex_llm.launch.ray import free_port
from hex_llm.launch.remote import GROUP, Lender
from hex_llm.types import Request

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
NUM_GAPS = 100  # of each stream, without prompts


def gaps(engine: Engine, given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds between the tokens of streams, while they are alone, and while prompts are prefilled."""
    draw = random.Random(0)
    endless = SamplingParams(max_tokens=given.max_len - 32, ignore_eos=True, temperature=0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(3, MODEL["vocab_size"]) for _ in range(num)]  # type: ignore[call-overload]

    for i in range(given.streams):
        engine.add(Request(f"s{i}", ids(16), endless))
    last: dict[str, float] = {}
    alone, beside, waiting = list[float](), list[float](), set[str]()
    while not beside or waiting:
        if not waiting and len(alone) >= NUM_GAPS * given.streams:
            for i in range(given.prompts):
                one = SamplingParams(max_tokens=1, temperature=0)
                engine.add(Request(f"p{i}", ids(given.max_len - 2), one))
                waiting.add(f"p{i}")
        noted = beside if waiting else alone
        for update in engine.step():
            name, now = update.request_id, time.perf_counter()
            if name.startswith("p"):
                waiting.discard(name)
            elif name in last:
                noted.append(now - last[name])
            last[name] = now
    for i in range(given.streams):
        engine.abort(f"s{i}")
    while engine.has_work:
        engine.step()
    return alone[len(alone) // 5 :], beside  # at first the streams themselves are prefilled


@contextmanager
def started(config: EngineConfig) -> Iterator[Engine]:
    engine, _ = load_engine(config)
    engine.warm_up()
    yield engine
    engine.close()


@contextmanager
def in_processes(config: EngineConfig) -> Iterator[Engine]:
    """The group that prefills here, the other one in a process as on another host."""
    address, key = f"127.0.0.1:{free_port(2)}", "a key that both know"
    config = replace(config, num_hosts=2, coordinator_address=address, cluster_key=key)
    there, stopped = replace(config, host_index=1), threading.Event()

    def lend() -> None:
        os.sched_setaffinity(0, {1})  # this thread's, and so the process's that it starts
        Lender(there, 1, variables_of(there, os.environ)[0], stopped, GROUP).run()

    lender = threading.Thread(target=lend)
    lender.start()
    os.sched_setaffinity(0, {0})
    try:
        with started(config) as engine:
            for thread in map(int, os.listdir("/proc/self/task")):
                if thread != os.getpid():
                    os.setpriority(os.PRIO_PROCESS, thread, 15)
            yield engine
    finally:
        stopped.set()
        lender.join()


def measure(engine: Engine, name: str, given: argparse.Namespace) -> None:
    gaps(engine, given)  # the first round is slower
    shown = []
    for found in gaps(engine, given):
        cuts = quantiles(found, n=100)
        shown.append((cuts[49] * 1e3, cuts[98] * 1e3, len(found)))
    (median, p99, _), (busy_median, busy_p99, num) = shown
    print(
        f"{name}: alone {median:.1f} / {p99:.1f} ms (median / p99), with prompts "
        f"{busy_median:.1f} / {busy_p99:.1f} ms over {num} gaps: p99 x {busy_p99 / p99:.2f}; "
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max_len", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--processes", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = {**MODEL, "max_position_embeddings": given.max_len}
        Path(folder, "config.json").write_text(json.dumps(model))
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=given.max_len,
            max_decode_seqs=16,
            num_blocks=(given.streams + given.prompts + 4) * given.max_len // 32,
        )
        apart = replace(config, disagg_topo="1,1")
        if given.processes:
            with in_processes(apart) as engine:
                measure(engine, "apart, a core each", given)
            return
        for name, one in {"together": config, "apart": apart}.items():
            with started(one) as engine:
                measure(engine, name, given)


if __name__ == "__main__":
    main()
