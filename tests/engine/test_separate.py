"""Separate prefill and decode (--disagg_topo): the same tokens, and nothing held or lost."""

from __future__ import annotations

import pytest

from hex_llm.errors import ConfigError
from hex_llm.sampling_params import SamplingParams
from tests.engine.driving import GREEDY, LLAMA, drive, make_engine, request
from tests.tiny import Tiny

GEMMA2 = Tiny("gemma2", "Gemma2ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 16})
MIXTRAL = Tiny("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2})


def prompts(num: int) -> dict[str, list[int]]:
    return {f"r{i}": [3 + (i * j) % 90 for j in range(1, 2 + 9 * i)] for i in range(num)}


def tokens(engine, asked) -> dict[tuple[str, int], list[int]]:
    told = drive(engine, asked)
    return {name: [i for update in updates for i in update.token_ids] for name, updates in told.items()}


@pytest.fixture(scope="module")
def separate(folder):
    """One prefills and one decodes."""
    return make_engine(folder, disagg_topo="1,1")


def check_equal(engine, alone) -> None:
    seeded = SamplingParams(temperature=1, seed=5, max_tokens=12, ignore_eos=True, n=2)
    asked = [request(name, ids, GREEDY) for name, ids in prompts(6).items()]
    asked += [request("again", prompts(6)["r5"], GREEDY), request("sampled", [5, 6, 7], seeded)]
    asked += [request("short", [8], SamplingParams(temperature=0, max_tokens=1))]
    expected = tokens(alone, asked)
    assert tokens(engine, asked) == expected
    assert tokens(engine, asked) == expected  # now with prefixes that are cached
    assert engine.stats.num_prefix_hits > 0


def test_one_prefills_and_one_decodes(separate, folder):
    check_equal(separate, make_engine(folder))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("topology", ["1,1", "3,1", "1,2"])
@pytest.mark.parametrize("tiny", [LLAMA, GEMMA2, MIXTRAL], ids=lambda tiny: tiny.name)
def test_every_topology_gives_the_tokens_of_one_device(tmp_path, tiny, topology, size):
    tiny.save(tmp_path)
    kv = {"kv_cache_dtype": "int8" if size == 2 else "auto"}
    engine = make_engine(tmp_path, disagg_topo=topology, tensor_parallel_size=size, **kv)
    check_equal(engine, make_engine(tmp_path, **kv))


@pytest.mark.slow
def test_little_room_makes_sequences_wait_and_go_back(tmp_path):
    """Decoders that are full push back; who is preempted there is prefilled again."""
    LLAMA.save(tmp_path)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    asked = [request(name, ids, long) for name, ids in prompts(8).items()]
    small = {"block_size": 8, "num_blocks": 24}
    engine = make_engine(tmp_path, disagg_topo="1,1", **small)
    assert tokens(engine, asked) == tokens(make_engine(tmp_path, **small), asked)
    assert engine.stats.num_preemptions > 0


def test_who_leaves_on_the_way_leaves_nothing_behind(separate):
    engine = separate
    asked = [request(name, ids, GREEDY) for name, ids in prompts(6).items()]
    left = iter(prompts(6))

    def leave(step: int) -> None:
        if step % 2 and (name := next(left, None)):
            engine.abort(name)

    drive(engine, asked, between=leave)  # which checks blocks, slots and the book after every step
    assert not engine.has_work
    engine.check_idle()


def test_more_devices_than_there_are_are_refused(tmp_path):
    LLAMA.save(tmp_path)
    with pytest.raises(ConfigError, match="only 8 cpu device"):
        make_engine(tmp_path, disagg_topo="8,1")
