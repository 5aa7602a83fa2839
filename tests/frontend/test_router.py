"""Where requests are sent: by what replicas are thought to hold, and by what they have to do."""

from __future__ import annotations

import random
import time

from hex_llm.frontend.router import BUSIER, MORE, Router, block_keys
from hex_llm.sampling_params import SamplingParams
from hex_llm.scheduling.blocks import BlockPool
from hex_llm.types import AdapterRef, Request
from tests.server.fakes import LIMITS

IDLE = {0: 0, 1: 0}


def request(ids: list[int], **fields: object) -> Request:
    return Request("id", ids, SamplingParams(), **fields)  # type: ignore[arg-type]


def choose(router: Router, ids: list[int], loads: dict[int, int] = IDLE, **fields: object) -> int:
    return router.choose(request(ids, **fields), LIMITS, loads)


def ids_of(seed: int, num: int = 100) -> list[int]:
    return random.Random(seed).choices(range(250), k=num)


def test_a_prompt_goes_where_its_beginning_was_sent() -> None:
    router = Router(2)
    places = [choose(router, ids_of(seed)) for seed in range(10)]
    assert set(places) == {0, 1}
    for seed, place in enumerate(places):
        assert choose(router, [*ids_of(seed), 1, 2, 3]) == place
        assert choose(router, [*ids_of(seed)[:64], *ids_of(99)]) == place


def test_the_longest_part_counts() -> None:
    router, ids = Router(2), ids_of(0)
    assert choose(router, ids[:40], {0: 0}) == 0
    assert choose(router, ids, {1: 0}) == 1
    assert choose(router, [*ids, 7]) == 1
    assert choose(router, [*ids[:64], 7, *ids], {0: 0, 1: 3}) == 1


def test_who_is_clearly_busier_is_passed() -> None:
    router, ids = Router(2), ids_of(0)
    choose(router, ids, {1: 0})
    assert choose(router, ids, {0: 10, 1: int(BUSIER * 10 + MORE)}) == 1
    assert choose(router, ids, {0: 10, 1: int(BUSIER * 10 + MORE) + 1}) == 0
    # Both hold it now, so the less busy one is taken.
    assert choose(router, ids, {0: 5, 1: 4}) == 1
    assert choose(router, ids, {0: 4, 1: 5}) == 0


def test_what_nobody_holds_goes_to_the_idlest_and_by_turns() -> None:
    router = Router(3)
    assert choose(router, ids_of(0), {0: 2, 1: 1, 2: 2}) == 1
    places = [choose(router, ids_of(seed), {0: 0, 1: 0, 2: 0}) for seed in range(1, 9)]
    assert sorted(places) == [0, 0, 0, 1, 1, 2, 2, 2]
    assert choose(router, [1, 2], {1: 0}) == 1  # no whole block: there is nothing to be found


def test_salts_and_adapters_are_told_apart() -> None:
    keys = {
        block_keys(request(ids_of(0), **fields), 32)[-1]  # type: ignore[arg-type]
        for fields in ({}, {"cache_salt": "a"}, {"adapter": AdapterRef("a", "x")}, {"cache_salt": "ax"})
    }
    assert len(keys) == 4
    assert len(block_keys(request(ids_of(0)), 32)) == 3


def test_what_was_forgotten_or_is_long_unused_is_not_looked_for() -> None:
    router = Router(2)
    choose(router, ids_of(0), {1: 0})
    router.forget(1)
    assert choose(router, ids_of(0), {0: 0, 1: 0}) == 0
    for seed in range(1, 400):  # three blocks each, and a replica has 1,000
        choose(router, ids_of(seed), {0: 0})
    assert choose(router, ids_of(0), {0: 0, 1: 0}) == 1
    assert max(len(one._old) + len(one._young) for one in router._sent) <= LIMITS.max_blocks + 100


def test_conversations_find_their_replica_again() -> None:
    """Fifty of ten turns each: caches of two replicas have nine tenths of the hits of one as large as both.
    A replica's cache is a real pool of blocks, which holds less than all that was said."""

    def hits(num_replicas: int) -> int:
        draw, router, num_hits = random.Random(1), Router(num_replicas), 0
        pools = [BlockPool(1 + 1600 // num_replicas, 32) for _ in range(num_replicas)]
        talks = [ids_of(0, 64) + ids_of(seed, 40) for seed in range(50)]
        for _ in range(10):
            draw.shuffle(talks)
            for talk in talks:
                asked = request(talk)
                loads = {i: draw.randrange(6) for i in range(num_replicas)}
                pool = pools[router.choose(asked, LIMITS, loads)]
                talk += ids_of(len(talk), 50)  # the answer, and the next question
                keys = [str(key).encode() for key in block_keys(request(talk), 32)]
                found = pool.find(keys)
                num_hits += min(len(found), len(asked.prompt_ids) // 32)
                pool.share(found)
                blocks = found + pool.take(len(keys) - len(found))
                for block, key in zip(blocks, keys, strict=True):
                    pool.publish(block, key)
                pool.release(blocks)
        return num_hits

    alone = hits(1)
    assert alone > 1000
    assert hits(2) >= 0.9 * alone


def test_what_it_costs() -> None:
    """Not a measurement: twenty times what it takes, on a machine that others use."""
    router = Router(8)
    requests = [request(ids_of(seed, 1000)) for seed in range(200)]
    loads = dict.fromkeys(range(8), 0)
    began = time.process_time()
    for one in requests:
        router.choose(one, LIMITS, loads)
    assert (time.process_time() - began) / len(requests) < 1e-3
