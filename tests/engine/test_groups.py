"""Groups of devices in processes of their own, as on other hosts: the same tokens, and when a group is lost
only its own requests are."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from hex_llm.config import EngineConfig
from hex_llm.engine import separate
from hex_llm.engine.engine import Engine
from hex_llm.engine.loading import load_engine
from hex_llm.errors import ConfigError
from hex_llm.frontend.devices import variables_of
from hex_llm.launch.ray import free_port
from hex_llm.launch.remote import GROUP, Lender
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import FinishReason
from tests.engine.driving import GREEDY, LLAMA, drive, make_config, make_engine, request
from tests.engine.test_separate import GEMMA2, check_equal, prompts, tokens

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
# Whatever hangs, the test ends as if it had failed, and with it its processes.
pytestmark = pytest.mark.timeout(600, method="signal")


def lent() -> list[psutil.Process]:
    """The processes of groups."""
    children = psutil.Process().children()
    return [one for one in children if GROUP[-1] in one.cmdline()]


@contextmanager
def lending(config: EngineConfig) -> Iterator[list[BaseException]]:
    """As the commands on hosts other than the first; how they failed."""
    stopped, failed, threads = threading.Event(), list[BaseException](), list[threading.Thread]()

    def run(lender: Lender) -> None:
        try:
            lender.run()
        except BaseException as error:
            failed.append(error)

    for host in range(1, config.num_hosts):
        own = replace(config, host_index=host)
        variables = variables_of(own, os.environ)
        for i, each in enumerate(variables, host * len(variables)):
            threads.append(threading.Thread(target=run, args=(Lender(own, i, each, stopped, GROUP),)))
            threads[-1].start()
    try:
        yield failed
    finally:
        stopped.set()
        for thread in threads:
            thread.join(30)
        left = lent()
        for one in left:
            one.kill()
        assert not left


@contextmanager
def grouped(folder: Path, topology: str, num_hosts: int = 2, **flags: Any) -> Iterator[Engine]:
    """An engine here, as on host 0, and the groups that are not its own."""
    num_groups = sum(map(int, topology.split(",")))
    place = {"num_hosts": num_hosts, "coordinator_address": f"127.0.0.1:{free_port(num_groups)}"}
    key = {"cluster_key": "a key that hosts share", "warmup": False}
    config = make_config(folder, disagg_topo=topology, **place, **key, **flags)
    with lending(config):
        engine, _ = load_engine(config)
        try:
            yield engine
        finally:
            engine.close()


def test_one_prefills_here_and_one_decodes_elsewhere(folder: Path) -> None:
    with grouped(folder, "1,1") as engine:
        check_equal(engine, make_engine(folder))


@pytest.mark.slow
def test_log_probabilities_come_from_elsewhere(folder: Path) -> None:
    asked = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2, ignore_eos=True)
    some = [
        request("a", [3, 4, 5, 6], asked),
        request("b", [3, 4, 5], replace(asked, logprob_token_ids=(5,))),
    ]
    with grouped(folder, "2,2") as engine:
        for one in some:
            (told,), (expected,) = (drive(each, [one]).values() for each in (engine, make_engine(folder)))
            assert [u.token_ids for u in told] == [u.token_ids for u in expected]
            for name in ("logprobs", "prompt_logprobs"):
                ours, theirs = ([lp for u in each for lp in getattr(u, name)] for each in (told, expected))
                assert [lp.logprob for lp in ours] == pytest.approx([lp.logprob for lp in theirs])


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "num_hosts"), [("2,1", 3), ("1,2", 3), ("2,2", 2)])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tiny", [LLAMA, GEMMA2], ids=lambda tiny: tiny.name)
def test_every_topology_gives_the_tokens_of_one_device(tmp_path, tiny, size, topology, num_hosts):
    tiny.save(tmp_path)
    kv = {"kv_cache_dtype": "int8" if size == 2 else "auto"}
    with grouped(tmp_path, topology, num_hosts, tensor_parallel_size=size, **kv) as engine:
        check_equal(engine, make_engine(tmp_path, **kv))


@pytest.mark.slow
def test_little_room_makes_sequences_wait_and_go_back(folder: Path) -> None:
    asked = [request(name, ids, replace(GREEDY, max_tokens=60)) for name, ids in prompts(8).items()]
    small = {"block_size": 8, "num_blocks": 24}
    with grouped(folder, "1,1", **small) as engine:
        assert tokens(engine, asked) == tokens(make_engine(folder, **small), asked)
        assert engine.stats.num_preemptions > 0


@pytest.mark.slow
def test_who_leaves_on_the_way_leaves_nothing_behind(folder: Path) -> None:
    with grouped(folder, "2,1", 3) as engine:
        left = iter(prompts(6))

        def leave(step: int) -> None:
            if step % 2 and (name := next(left, None)):
                engine.abort(name)

        drive(engine, [request(name, ids, GREEDY) for name, ids in prompts(6).items()], between=leave)
        engine.check_idle()


def killing(engine: Engine, victim: int, asked: list[Any]) -> tuple[dict[str, list[int]], list[str]]:
    """The group's process is killed while it decodes or prefills: the tokens of those who ended well, and the
    errors of the others."""
    steppers = engine.stepper.steppers
    group, runner = engine.stepper._groups[steppers[victim]], steppers[victim].runner
    port = int(group.loaded.url.rpartition(":")[2])
    process = next(p for p in lent() if port in [one.laddr.port for one in p.net_connections()])
    well, errors = dict[str, list[int]](), list[str]()
    is_killed, noticed, ended = False, None, None
    for one in asked:
        engine.add(one)
    while engine.has_work:
        if not is_killed and steppers[victim].scheduler.running:
            process.kill()
            is_killed = True
        for update in engine.step():
            well.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason is FinishReason.ERROR:
                errors.append(update.error)
                del well[update.request_id]
                ended = time.monotonic()
        if noticed is None and not runner.is_up:
            noticed = time.monotonic()
        engine.check()
    assert noticed is not None
    assert ended is not None
    assert ended - noticed < 5
    while not runner.is_up:  # it is started again by its host
        engine.tend()
        time.sleep(0.01)
    return well, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "num_hosts", "victim"),
    [("2,1", 3, 1), ("1,2", 3, 2), ("1,1", 2, 1)],
    ids=["one of two prefillers", "one of two decoders", "the last decoder"],
)
def test_a_lost_group_ends_its_own_requests_and_comes_back(folder, topology, num_hosts, victim):
    asked = [request(name, ids, LONG) for name, ids in prompts(8).items()]
    expected = {name: ids for (name, _), ids in tokens(make_engine(folder), asked).items()}
    with grouped(folder, topology, num_hosts) as engine:
        well, errors = killing(engine, victim, asked)
        assert set(errors) == {"the devices that worked at this request are gone"}
        assert len(well) + len(errors) == len(asked)
        assert all(expected[name] == ids for name, ids in well.items())
        assert well or topology == "1,1"
        assert {name: ids for (name, _), ids in tokens(engine, asked).items()} == expected
        engine.check_idle()


@pytest.mark.slow
def test_a_group_that_is_stuck_in_a_step_is_lost_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [request("a", [1, 2, 3], GREEDY)]
    with grouped(folder, "1,1") as engine:
        expected = tokens(engine, asked)
        monkeypatch.setattr(separate, "STEP_S", 0.0)
        engine.add(asked[0])
        updates = []
        while engine.has_work:
            updates += engine.step()
        assert updates[-1].error == "the devices that worked at this request are gone"
        monkeypatch.undo()
        assert tokens(engine, asked) == expected
        engine.check_idle()


@pytest.mark.slow
def test_hosts_that_disagree_are_told_in_what(folder: Path) -> None:
    place = {"num_hosts": 2, "coordinator_address": f"127.0.0.1:{free_port(2)}", "disagg_topo": "1,1"}
    config = make_config(folder, cluster_key="a key that hosts share", **place)
    message = "host 0 has --block_size=32, that of group 1 --block_size=16"
    with lending(replace(config, block_size=16)) as failed:
        with pytest.raises(ConfigError, match=message):
            load_engine(config)
        until = time.monotonic() + 60
        while not failed:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert message in str(failed[0])
