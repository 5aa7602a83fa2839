"""One replica over several hosts: here, processes with devices of their own, joined by gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.engine.driving import GREEDY, LLAMA, drive, make_engine, request
from tests.tiny import Tiny
from tools.hosts import free_port

SMALL = {
    "skip_tokenizer_init": True,
    "num_blocks": 64,
    "max_decode_seqs": 8,
    "max_model_len": 256,
    "prefill_len_padding": 64,
}
PROMPTS = {"a": list(range(3, 40)), "b": [7, 8, 9], "c": list(range(3, 30))}
MIXTRAL = Tiny("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2})
GEMMA2 = Tiny("gemma2", "Gemma2ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 16})


def start_hosts(num_hosts: int, asked: Any, own: Any = None, **flags: Any) -> list[Any]:
    address = f"127.0.0.1:{free_port()}"
    per_host = flags["tensor_parallel_size"] // num_hosts
    fast = f"--xla_force_host_platform_device_count={per_host} --xla_backend_optimization_level=0"
    hosts = []
    for index in range(num_hosts):
        place = {"num_hosts": num_hosts, "host_index": index, "coordinator_address": address}
        given = json.dumps(
            {**SMALL, "dtype": "float32", "warmup": False, **place, **flags, **(own or {}).get(index, {})}
        )
        command = [sys.executable, "-m", "tests.parallel.one_host", given, json.dumps(asked)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        hosts.append(
            subprocess.Popen(
                command, env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {fast}"}, **pipes
            )
        )
    return hosts


def run_hosts(*args: Any, **flags: Any) -> list[tuple[int, str, str]]:
    """The exit code and what it said, of each."""
    hosts = start_hosts(*args, **flags)
    try:
        said = [host.communicate(timeout=600) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    return [(host.returncode, *texts) for host, texts in zip(hosts, said, strict=True)]


def check_equal(folder: Any, num_hosts: int, size: int, **params: Any) -> None:
    asked = [
        [name, ids, {"temperature": 0, "max_tokens": 16, "ignore_eos": True, **params}]
        for name, ids in PROMPTS.items()
    ]
    told = run_hosts(num_hosts, asked, model=str(folder), tensor_parallel_size=size)
    assert [code for code, _, _ in told] == [0] * num_hosts, told
    alone = drive(make_engine(folder), [request(name, ids, GREEDY) for name, ids in PROMPTS.items()])
    expected = {f"{name}.{i}": [u.token_ids for u in updates] for (name, i), updates in alone.items()}
    assert json.loads(told[0][1].splitlines()[-1]) == expected


def test_two_hosts_give_the_tokens_of_one_device(tmp_path):
    LLAMA.save(tmp_path)
    check_equal(tmp_path, 2, 2, prompt_logprobs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("num_hosts", "size"), [(2, 4), (4, 4), (4, 8)])
@pytest.mark.parametrize("tiny", [LLAMA, MIXTRAL, GEMMA2], ids=lambda tiny: tiny.name)
def test_all_numbers_of_hosts_give_the_tokens_of_one_device(tmp_path, tiny, num_hosts, size):
    replace(tiny, changes={**tiny.changes, "num_attention_heads": 8}).save(tmp_path)
    check_equal(tmp_path, num_hosts, size)


def test_hosts_that_disagree_say_in_what(tmp_path):
    LLAMA.save(tmp_path)
    own = {1: {"block_size": 16}}
    told = run_hosts(2, [], own, model=str(tmp_path), tensor_parallel_size=2)
    for code, _, errors in told:
        assert code != 0
        assert "ConfigError: the hosts disagree: host 0 has --block_size=32, host 1 --block_size=16" in errors


@pytest.mark.slow
def test_a_host_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    LLAMA.save(tmp_path)
    hosts = start_hosts(2, [], model=str(tmp_path), tensor_parallel_size=2)
    hosts[1].kill()
    _, errors = hosts[0].communicate(timeout=90)
    assert hosts[0].returncode != 0
    assert "2 hosts: not all came within 45 s" in errors


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_host_is_lost_the_others_end(tmp_path, victim, how):
    LLAMA.save(tmp_path)
    asked = [["a", [1, 2, 3], {"temperature": 0, "max_tokens": 200, "ignore_eos": True}]]
    hosts = start_hosts(2, asked, model=str(tmp_path), tensor_parallel_size=2)
    try:
        for line in hosts[0].stderr:
            if line.startswith("step 5"):
                break
        hosts[victim].send_signal(how)
        hosts[1 - victim].communicate(timeout=30)
        # Host 0 is also where jax's own service is: who notices first, we or jax, which aborts.
        assert hosts[1 - victim].returncode in ((1,) if victim else (1, -signal.SIGABRT))
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
