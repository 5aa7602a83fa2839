"""Requests through the client to a real worker process; only the engine in it is a fake."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from hex_llm.errors import EngineStopped, HexError, InvalidRequest, QueueFull, TimedOut
from hex_llm.frontend import client as module
from hex_llm.frontend.client import EngineClient
from hex_llm.frontend.requests import Observer, Timeline
from hex_llm.ipc.stats import EngineState, Stats
from hex_llm.sampling_params import SamplingParams
from hex_llm.types import FinishReason
from tests.frontend.clients import CONFIG, LONG, SHORT, complete, until, with_client
from tests.server.fakes import (
    BOS,
    EOS,
    FAILS_TO_ADD,
    FIRST_BYTE,
    HANGS,
    LIMITS,
    ByteCodec,
    byte_tokenizer,
    fake_worker,
)

# ---- requests


def test_texts_and_ids_are_completed() -> None:
    async def test(client: EngineClient) -> None:
        assert (client.limits, client.max_len) == (LIMITS, LIMITS.max_len)
        text, ids = await asyncio.gather(
            complete(client, "hello", SamplingParams(max_tokens=None)),
            complete(client, [7, 8, 9], SamplingParams(max_tokens=2)),
        )
        assert text.outputs[0].text == "olleh"
        assert text.outputs[0].finish_reason is FinishReason.STOP
        assert text.prompt == "hello"
        assert text.num_cached_tokens == 5
        assert ids.outputs[0].token_ids == [9, 8]
        assert ids.request_id != text.request_id

    with_client(test)


def test_a_text_that_cannot_fit_is_refused_before_it_is_cut_into_tokens() -> None:
    async def test(client: EngineClient) -> None:
        codec = ByteCodec()
        client.tokenizer = byte_tokenizer(codec=codec)
        with pytest.raises(InvalidRequest, match=r"at least \d+ tokens; .* may have 4096") as caught:
            await complete(client, "a" * 5_000_000, SHORT)
        assert caught.value.param == "prompt"
        assert not codec.threads
        kept = SamplingParams(max_tokens=1, truncate_prompt_tokens=3)
        assert len((await complete(client, "a" * 100_000, kept)).prompt_token_ids) == 3

    with_client(test)


def test_large_reports_are_taken_in_like_small_ones() -> None:
    async def test(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=20)
        prompt = [50 + i % 200 for i in range(4000)]  # of which the first report tells a megabyte
        large, small = await asyncio.gather(complete(client, prompt, params), complete(client, [5, 6], LONG))
        assert large.prompt_logprobs is not None
        told = zip(prompt[1:], large.prompt_logprobs[1:], strict=True)
        assert [known[i].logprob for i, known in told if known] == [-i / 1000 for i in prompt[1:]]
        assert large.outputs[0].token_ids == prompt[:-6:-1]
        assert [len(known) for known in large.outputs[0].logprobs or ()] == [3] * 5
        assert len(small.outputs[0].token_ids) == 4000

    with_client(test)


def test_without_a_tokenizer() -> None:
    async def test(client: EngineClient) -> None:
        client.tokenizer = None
        output = await complete(client, [7, 8], SamplingParams(max_tokens=2))
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [8, 7])
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await complete(client, "text", SHORT)

    with_client(test)


def test_stop_strings_end_choices_here_and_in_the_engine(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def test(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=4000, ignore_eos=True, stop=("ba",), n=2)
        output = await complete(client, "abc", params)
        assert [choice.text for choice in output.outputs] == ["c", ""]
        assert [choice.stop_reason for choice in output.outputs] == ["ba", "ba"]
        await until(lambda: "idle" in journal.read_text())
        assert sorted(journal.read_text().split("\n"))[1:] == ["add", "idle", "stop 0", "stop 1"]
        assert client.replicas[0].status.num_steps < 100

    with_client(test, f"FakeEngine(Path({str(journal)!r}), step_s=0.01)")


def test_best_of_returns_the_best() -> None:
    async def test(client: EngineClient) -> None:
        output = await complete(client, "ab", SamplingParams(max_tokens=9, best_of=3))
        (choice,) = output.outputs
        # Low ids are likely: the choice that leaves out both letters.
        assert (choice.text, choice.token_ids, choice.logprobs) == ("", [BOS, EOS], None)

    with_client(test)


def test_what_is_wrong_is_told_to_its_caller_alone() -> None:
    async def test(client: EngineClient) -> None:
        bystander = asyncio.create_task(complete(client, [5], SamplingParams(max_tokens=50, ignore_eos=True)))
        with pytest.raises(InvalidRequest) as caught:
            await complete(client, [LIMITS.vocab_size], SHORT)
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequest):
            await complete(client, "a", SHORT, cache_salt="x" * 5000)
        with pytest.raises(HexError) as odd:
            await complete(client, [FAILS_TO_ADD], SHORT)
        assert type(odd.value) is HexError
        assert "0x7f" not in str(odd.value)
        assert len((await bystander).outputs[0].token_ids) == 50
        assert client.ready
        assert not client.replicas[0].requests

    with_client(test, "FakeEngine(step_s=0.01)")


def test_an_engine_judges_requests_for_itself() -> None:
    """What passes here by mistake is refused there."""

    async def test(client: EngineClient) -> None:
        assert client.limits is not None
        client.limits = module.Limits(**{**vars(client.limits), "vocab_size": 10**6})
        with pytest.raises(InvalidRequest) as caught:
            await complete(client, [LIMITS.vocab_size], SHORT)
        assert caught.value.param == "prompt"

    with_client(test)


def test_a_full_queue_is_told() -> None:
    async def test(client: EngineClient) -> None:
        first = asyncio.create_task(complete(client, [5], LONG))
        await until(lambda: client.replicas[0].status.num_steps)
        with pytest.raises(QueueFull):
            await complete(client, [5], SHORT)
        first.cancel()

    with_client(test, "FakeEngine(max_requests=1, step_s=0.01)")


def test_output_that_cannot_be_put_together_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(module.OutputCollector):
        def add(self, update: Any) -> bool:
            if self.request.prompt_ids == [6]:
                raise RuntimeError("a bug")
            return super().add(update)

    monkeypatch.setattr(module, "OutputCollector", Broken)

    async def test(client: EngineClient) -> None:
        good, bad = await asyncio.gather(
            complete(client, [5], LONG), complete(client, [6], LONG), return_exceptions=True
        )
        assert isinstance(bad, HexError)
        assert not isinstance(good, BaseException)
        assert len(good.outputs[0].token_ids) == 4000
        assert client.ready

    with_client(test)


# ---- streams


def test_many_streams_lose_no_token() -> None:
    """64 at once, some of which are read slowly; every token comes once and in order."""
    draw = random.Random(0)

    async def read(client: EngineClient, number: int) -> None:
        prompt = [FIRST_BYTE + draw.randrange(128) for _ in range(draw.randint(1, 300))]
        params = SamplingParams(max_tokens=None, n=1 + number % 3, logprobs=1, skip_special_tokens=False)
        found: dict[int, list[Any]] = {i: [] for i in range(params.n)}
        async with client.generate(prompt, params) as generation:
            async for delta in generation:
                found[delta.index].append(delta)
                if number % 8 == 0:
                    await asyncio.sleep(0.02)
            final = generation.output()
        assert final.finished
        for output in final.outputs:
            mine = found[output.index]
            ids = [*reversed(prompt), EOS][output.index :]
            assert [i for delta in mine for i in delta.token_ids] == output.token_ids == ids
            assert [i for delta in mine for known in delta.logprobs for i in list(known)[:1]] == ids
            text = "".join(delta.text for delta in mine)
            assert text == output.text
            assert text == byte_tokenizer().decode(ids[:-1])
            ends = [delta.finish_reason for delta in mine if delta.finish_reason is not None]
            assert ends == [FinishReason.STOP]

    async def test(client: EngineClient) -> None:
        await asyncio.gather(*(read(client, number) for number in range(64)))
        assert not client.replicas[0].requests

    with_client(test)


def test_a_slow_reader_gets_all_at_once_and_holds_up_nobody() -> None:
    async def test(client: EngineClient) -> None:
        async with client.generate([5, 6], SamplingParams(max_tokens=200, ignore_eos=True)) as slow:
            await asyncio.gather(*(complete(client, [7], SamplingParams(max_tokens=300)) for _ in range(10)))
            await slow.until_end()
            deltas = [delta async for delta in slow]
        assert len(deltas) == 1
        assert deltas[0].token_ids == [6, 5] * 100

    with_client(test)


# ---- cancelling


@pytest.mark.parametrize("stage", ["at once", "encoding", "queued", "running", "many steps", "last token"])
@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_aborts_at_every_stage(stage: str, stream: bool, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    journal.touch()

    async def ask(client: EngineClient) -> None:
        params = SamplingParams(max_tokens=3) if stage == "last token" else LONG
        if not stream:
            await complete(client, [5, 6], params)
            return
        async with client.generate([5, 6], params) as generation:
            async for _ in generation:
                pass

    async def reach(client: EngineClient) -> None:
        if stage == "encoding":
            await asyncio.sleep(0)
        elif stage == "queued":
            await until(lambda: client.replicas[0].requests)
        elif stage == "running":
            await until(lambda: client.replicas[0].status.num_steps > 1)
        elif stage == "many steps":
            await until(lambda: client.replicas[0].status.num_steps > 20)
        elif stage == "last token":
            await until(lambda: client.replicas[0].status.num_steps >= 4)

    async def test(client: EngineClient) -> None:
        await complete(client, [9], SHORT)
        assert client.replicas[0].status.num_steps == 1
        task = asyncio.create_task(ask(client))
        await reach(client)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await complete(client, [9], SHORT)  # all before it has reached the engine
        await until(lambda: journal.read_text().endswith("idle\n"))
        assert not client.replicas[0].requests
        events = journal.read_text().split()
        if stage in ("queued", "running", "many steps"):
            assert events.count("abort") == 1
        if stage in ("at once", "encoding"):
            assert (events.count("add"), events.count("abort")) == (2, 0)
        assert client.ready

    with_client(test, f"FakeEngine(Path({str(journal)!r}), step_s=0.005)")


def test_leaving_a_stream_aborts_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def test(client: EngineClient) -> None:
        async with client.generate([5, 6], LONG) as generation:
            async for _ in generation:
                break
        await until(lambda: "idle" in journal.read_text())
        assert journal.read_text().split() == ["add", "abort", "idle"]

    with_client(test, f"FakeEngine(Path({str(journal)!r}), step_s=0.005)")


# ---- what is told of it


class Watching(Observer):
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.steps: list[tuple[int, int]] = []

    def began(self, timeline: Timeline) -> None:
        self.told.append("began")

    def got_first_token(self, timeline: Timeline) -> None:
        self.told.append("first")

    def stepped(self, stats: Stats, num_tokens: int, pauses: list[float]) -> None:
        self.steps.append((num_tokens, len(pauses)))

    def ended(self, timeline: Timeline, reasons: list[str]) -> None:
        self.told.append((timeline, reasons))


def test_an_observer_is_told_of_each_request() -> None:
    async def test(client: EngineClient) -> None:
        watching = Watching()
        client.observe(watching)
        await complete(client, [7, 8], SamplingParams(max_tokens=2, n=2))
        assert watching.told[:-1] == ["began", "first"]
        assert watching.steps == [(2, 0), (2, 2)]
        timeline, reasons = watching.told[-1]
        assert reasons == ["length", "stop"]
        assert timeline.queued_s == 0.001
        assert timeline.begun == timeline.sent + timeline.queued_s
        assert timeline.arrived <= timeline.sent <= timeline.first <= timeline.latest <= timeline.ended
        assert (timeline.num_prompt, timeline.num_cached, timeline.num_generated) == (2, 1, 4)

        watching.told.clear()
        async with client.generate([5], LONG) as generation:
            async for _ in generation:
                break
        assert watching.told[-1][1] == ["abort"]
        output = await complete(client, "ab", SamplingParams(max_tokens=9, stop=("a",)))
        assert output.outputs[0].text == "b"
        assert watching.told[-1][1] == ["stop"]
        watching.told.clear()
        with pytest.raises(HexError):
            await complete(client, [FAILS_TO_ADD], SHORT)
        assert {*watching.told} <= {"began"}
        task = asyncio.create_task(complete(client, [5], LONG))
        await until(lambda: "first" in watching.told)
        client.fail(EngineState.STOPPED)
        with pytest.raises(EngineStopped):
            await task
        assert watching.told[-1][1] == ["error"]

    with_client(test, "FakeEngine(step_s=0.001)")


def test_work_is_pending_until_the_engine_has_told_its_end() -> None:
    async def test(client: EngineClient) -> None:
        assert client.replicas[0].status.stalled_s == 0
        await complete(client, [5], SamplingParams(max_tokens=2, n=2))
        with pytest.raises(HexError):
            await complete(client, [FAILS_TO_ADD], SHORT)
        assert client.replicas[0].status.num_pending == 0
        assert client.replicas[0].status.memory == "memory: none"
        task = asyncio.create_task(complete(client, [HANGS], SHORT))
        await until(lambda: client.replicas[0].status.stalled_s > 1)
        task.cancel()  # that nobody waits any more does not make the engine well
        await asyncio.sleep(0.5)
        assert not client.replicas[0].requests
        assert client.replicas[0].status.num_pending == 1
        assert 0.4 < client.replicas[0].status.stalled_s < 5
        await client.stop(0.1)

    with_client(test, step_timeout_s=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_only_so_much_time(stream: bool, tmp_path: Path) -> None:
    journal = tmp_path / "journal"

    async def read(client: EngineClient) -> None:
        async with client.generate([5], LONG) as generation:
            async for _ in generation:
                pass

    async def test(client: EngineClient) -> None:
        client.request_timeout_s = 0.3
        started = time.monotonic()
        with pytest.raises(TimedOut, match=r"0.3 s"):
            await (read(client) if stream else complete(client, [5], LONG))
        assert 0.2 < time.monotonic() - started < 25
        await until(lambda: "idle" in journal.read_text())
        assert journal.read_text().split() == ["add", "abort", "idle"]
        await complete(client, [5], SHORT)

    with_client(test, f"FakeEngine(Path({str(journal)!r}), step_s=0.01)")


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bars of the loading process show."""
    load = "[[time.sleep(0.2) for _ in __import__('tqdm').tqdm(range(20), 'Compiling')], FakeEngine()][-1]"

    async def run() -> None:
        client = EngineClient(CONFIG, "fake", fake_worker(load))
        starting = asyncio.create_task(client.start())
        await until(lambda: client.replicas[0].status.progress.startswith("Compiling"))
        assert client.replicas[0].status.progress.endswith("/20")
        await starting
        assert client.replicas[0].status.progress == ""
        await client.stop(5)

    asyncio.run(asyncio.wait_for(run(), 30))
