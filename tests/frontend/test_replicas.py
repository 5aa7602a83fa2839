"""Several engines behind one client: who gets what, and what becomes of requests when one of them goes. Real
processes, fake engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hex_llm.errors import EngineStopped, HexError, InvalidRequest, ModelError, QueueFull
from hex_llm.frontend.client import EngineClient
from hex_llm.ipc.stats import EngineState
from hex_llm.sampling_params import SamplingParams
from tests.frontend.clients import CONFIG, LONG, SHORT, complete, process_of, until, with_client
from tests.server.fakes import FAILS_TO_STEP, HANGS, fake_worker

TWO = replace(CONFIG, data_parallel_size=2)
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


def steps(client: EngineClient) -> list[int]:
    return [one.status.num_steps for one in client.replicas]


def loads(client: EngineClient) -> list[int]:
    return [one.load for one in client.replicas]


def test_requests_are_divided_and_choices_stay_together() -> None:
    async def test(client: EngineClient) -> None:
        tasks = [asyncio.create_task(complete(client, [i], ENDLESS)) for i in range(5, 9)]
        await until(lambda: loads(client) == [2, 2])
        tasks.append(asyncio.create_task(complete(client, [9], SamplingParams(n=2, max_tokens=4000))))
        await until(lambda: sorted(loads(client)) == [2, 4])
        assert client.room.num_sequences == 6
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        few = SamplingParams(n=2, max_tokens=5, ignore_eos=True)
        for one in await asyncio.gather(*(complete(client, [i], few) for i in range(5, 9))):
            assert one.outputs[0].token_ids == one.prompt_token_ids * 5
            assert len(one.outputs) == 2
        assert min(steps(client)) > 0
        assert client.max_sequences == 2 * client.replicas[0].status.limits.max_sequences  # type: ignore[union-attr]

    with_client(test, "FakeEngine(step_s=0.01)", config=TWO)  # 40 s for who is not cancelled


@pytest.mark.parametrize("sign", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_the_death_of_one_is_none_of_the_others_business(sign: signal.Signals) -> None:
    async def test(client: EngineClient) -> None:
        tasks = [asyncio.create_task(complete(client, [i], LONG)) for i in range(5, 11)]
        await until(lambda: [one.status.stats.num_running for one in client.replicas] == [3, 3])
        dead, other = process_of(client, 0), process_of(client, 1)
        started = time.monotonic()
        os.kill(dead.pid, sign)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [end for end in ends if isinstance(end, EngineStopped)]
        assert len(failed) == 3
        assert sum(len(end.outputs[0].token_ids) == 4000 for end in ends if end not in failed) == 3  # type: ignore[union-attr]
        assert time.monotonic() - started < 60
        assert client.ready
        assert len((await complete(client, [5], SHORT)).outputs[0].token_ids) == 1
        await until(lambda: client.replicas[0].serves)
        assert process_of(client, 0).pid != dead.pid
        assert process_of(client, 1).pid == other.pid
        client.replicas[1].status.state = EngineState.DRAINING
        assert len((await complete(client, [5], SHORT)).outputs[0].token_ids) == 1

    with_client(test, "FakeEngine(step_s=0.002)", TWO, stuck_timeout_s=3)


def test_a_request_without_a_token_moves() -> None:
    """Its engine has not begun with it when it is stopped, and then killed."""

    async def test(client: EngineClient) -> None:
        client.replicas[1].status.state = EngineState.DRAINING
        os.kill(process_of(client, 0).pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(complete(client, [i], SamplingParams(n=2))) for i in (5, 6)]
        await until(lambda: loads(client) == [4, 0])
        client.replicas[1].status.state = EngineState.SERVING
        process_of(client, 0).kill()
        outputs = await asyncio.gather(*tasks)
        assert [one.outputs[0].token_ids for one in outputs] == [[5, 2], [6, 2]]
        assert loads(client) == [0, 0]
        await until(lambda: client.replicas[0].serves)

    with_client(test, config=TWO)


def test_a_request_that_is_the_end_of_engines_moves_once() -> None:
    async def test(client: EngineClient) -> None:
        with pytest.raises(EngineStopped):
            await complete(client, [7, FAILS_TO_STEP], SamplingParams(max_tokens=5))
        await until(lambda: all(one.serves for one in client.replicas))
        await complete(client, [5], SHORT)

    with_client(test, config=replace(CONFIG, data_parallel_size=3))


def test_a_restart_on_purpose_fails_nobody() -> None:
    async def test(client: EngineClient) -> None:
        before = [process_of(client, i).pid for i in (0, 1)]
        running, num_done = True, 0

        async def ask(token: int) -> None:
            nonlocal num_done
            while running:
                params = SamplingParams(max_tokens=50, ignore_eos=True)
                assert (await complete(client, [token], params)).outputs[0].token_ids == [token] * 50
                num_done += 1

        asking = [asyncio.create_task(ask(token)) for token in range(5, 13)]
        await until(lambda: num_done > 8)
        client.restart()
        with pytest.raises(InvalidRequest, match="already"):
            client.restart()
        await until(lambda: client._restarting is not None and client._restarting.done())
        assert all(one.serves for one in client.replicas)
        after = num_done
        await until(lambda: num_done > after + 8)
        running = False
        await asyncio.gather(*asking)
        assert not {*before} & {process_of(client, i).pid for i in (0, 1)}

    with_client(test, "FakeEngine(step_s=0.005)", TWO)


def test_one_alone_is_not_restarted() -> None:
    with pytest.raises(InvalidRequest, match="one replica"):
        EngineClient(CONFIG).restart()


def test_the_end_may_come_during_a_restart() -> None:
    async def test(client: EngineClient) -> None:
        task = asyncio.create_task(complete(client, [5], LONG))
        await until(lambda: max(steps(client)))
        client.restart()
        await until(lambda: EngineState.DRAINING in {one.status.state for one in client.replicas})
        client.fail(EngineState.SHUTTING_DOWN)
        with pytest.raises(EngineStopped, match="shutting down"):
            await task

    with_client(test, "FakeEngine(step_s=0.01)", TWO)


def test_full_replicas_are_passed_and_places_counted_as_a_whole() -> None:
    async def test(client: EngineClient) -> None:
        assert client.max_sequences == 8
        tasks = [
            asyncio.create_task(complete(client, [5], SamplingParams(n=3, max_tokens=4000, ignore_eos=True)))
        ]
        await until(lambda: sum(loads(client)) == 3)
        tasks += [asyncio.create_task(complete(client, [i], ENDLESS)) for i in range(6, 10)]
        await until(lambda: sum(loads(client)) == 7)
        assert sorted(loads(client)) == [3, 4]
        with pytest.raises(QueueFull):
            await complete(client, [9], SamplingParams(n=2))
        with pytest.raises(InvalidRequest):
            await complete(client, [9], SamplingParams(n=9))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: sum(loads(client)) == 0)

    with_client(test, "FakeEngine(step_s=0.01, max_sequences=4)", TWO)


def test_one_that_cannot_be_loaded_ends_all(tmp_path: Path) -> None:
    """The second, once the first is there: nothing is left."""
    mark = tmp_path / "mark"
    load = (
        f"fail(ModelError('no')) if Path({str(mark)!r}).exists() "
        f"else [Path({str(mark)!r}).touch(), FakeEngine()][1]"
    )

    async def run() -> None:
        client = EngineClient(TWO, "fake", fake_worker(load))
        with pytest.raises(ModelError, match=r"^no$"):
            await asyncio.wait_for(client.start(), 30)
        for one in client.replicas:
            assert one.supervisor.process is not None
            assert not one.supervisor.process.is_running
            assert not one.supervisor.process.folder.exists()
        with pytest.raises(HexError):
            await complete(client, [5], SHORT)
        await client.stop(1)

    asyncio.run(run())


@pytest.mark.slow
def test_a_hanging_step_of_one_is_none_of_the_others_business() -> None:
    async def test(client: EngineClient) -> None:
        hanging = asyncio.create_task(complete(client, [5, HANGS], SamplingParams(max_tokens=1)))
        await until(lambda: sum(loads(client)))
        other = asyncio.create_task(complete(client, [6], LONG))
        with pytest.raises(EngineStopped):
            await hanging
        assert len((await other).outputs[0].token_ids) == 4000

    with_client(test, "FakeEngine(step_s=0.001)", replace(CONFIG, data_parallel_size=3), step_timeout_s=2)
