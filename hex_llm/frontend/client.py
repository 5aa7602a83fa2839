"""The front end's side of the engines: takes requests, sends each to one of them, and gives their outputs.

Lives in one event loop. Text is made here, so that the engine's process only steps. Every request gets one
end: its output, an InvalidRequest, QueueFull, TimedOut or EngineStopped. No jax.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from hex_llm.admission import Limits, make_request
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, EngineStopped, HexError, InvalidRequest, ModelError, QueueFull
from hex_llm.frontend.beside import read
from hex_llm.frontend.devices import variables_of
from hex_llm.frontend.outputs import OutputCollector
from hex_llm.frontend.process import Supervisor
from hex_llm.frontend.replica import Replica
from hex_llm.frontend.requests import Generation, Observer, Room, Timeline
from hex_llm.frontend.router import Router
from hex_llm.ipc.children import STAND_IN
from hex_llm.ipc.protocol import Ready, request_id
from hex_llm.ipc.stats import EngineState, leading
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import Pooling, Request, RequestOptions
from hex_llm.weights import default_model
from hex_llm.weights.adapter_source import AdapterNames
from hex_llm.weights.model_files import open_tokenizer, read_sampling_defaults
from hex_llm.weights.source import fetch_for, pinned

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "hex_llm.engine.worker")
BY_MEMORY = ("max_blocks", "max_sequences")  # the limits that depend on it


class EngineClient:
    """Engines in processes of their own, --data_parallel_size of them. `limits` and `tokenizer` are known
    once they are ready.

    `observe`, `log_format` and the timeouts may be set before the start.
    """

    limits: Limits | None = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None  # instead of the tokenizer's
    sampling_defaults: Mapping[str, Any] = MappingProxyType({})  # of the model's generation_config.json

    def __init__(self, config: EngineConfig, model_name: str = "", command: Sequence[str] = WORKER) -> None:
        """ConfigError: there are not enough devices."""
        self.config = config
        self.adapters = AdapterNames(config)
        self.model_name = model_name
        self.log_format = "text"
        self.front, self.num_fronts = 0, 1  # the number of this front end, and how many there are
        self.request_timeout_s = 0.0  # what a request may take in all; 0: any
        self.stuck_timeout_s = 20.0  # that an engine may be silent
        self.step_timeout_s = 300.0  # for a step; 0: any
        self.replicas = [Replica(self, command, each) for each in variables_of(config, os.environ)]
        self._num_here = len(self.replicas)
        elsewhere = range(self._num_here, config.data_parallel_size)
        self.replicas += [Replica(self, (*STAND_IN, str(i)), {}) for i in elsewhere]
        for i, one in enumerate(self.replicas):
            one.status.host = i // self._num_here
        self.room = Room(*(one.requests.places for one in self.replicas))
        self.router = Router(len(self.replicas))
        self._restarting: asyncio.Task[None] | None = None
        self._adopting = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return any(one.serves for one in self.replicas)

    @property
    def max_len(self) -> int:
        assert self.limits is not None, "not loaded yet"
        return self.limits.longest

    @property
    def pooling(self) -> Pooling:
        assert self.limits is not None, "not loaded yet"
        return self.limits.pooling

    @property
    def max_sequences(self) -> int:
        """That may be waiting and running: the share of this front end."""
        assert self.limits is not None, "not loaded yet"
        most = self.config.max_concurrent_requests or self.limits.max_sequences * len(self.replicas)
        return max(most // self.num_fronts, 1)

    def observe(self, observer: Observer) -> None:
        for one in self.replicas:
            one.statistics.observer = observer

    # ---- the processes

    async def start(self) -> None:
        """Returns when all engines serve; raises why one could not be loaded, and nothing is left then."""
        # Once: the tokenizer and the engines that follow these are of the same version of the model.
        self.config = await asyncio.to_thread(pinned, self.config)
        supervisors = [one.supervisor for one in self.replicas]
        here, elsewhere = supervisors[: self._num_here], supervisors[self._num_here :]

        async def start_behind(one: Supervisor) -> None:
            await asyncio.shield(starting[0])  # which fetches and compiles what the others then find
            await one.start()

        jobs = (here[0].start(), *map(start_behind, here[1:]), *(one.start() for one in elsewhere))
        starting = [asyncio.create_task(job) for job in jobs]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for one in starting:
                one.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop(0)
            raise

    async def stop(self, timeout_s: float) -> None:
        """Ends the processes: after their present steps or, if these or loading take longer, at once."""
        self.fail(EngineState.STOPPED)
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        await asyncio.gather(*(one.supervisor.stop(timeout_s) for one in self.replicas))

    def fail(self, state: EngineState) -> None:
        """Ends every request, and all that are still to come, with EngineStopped."""
        for one in self.replicas:
            one.status.state = state
        for one in self.replicas:
            one.fail(state)

    def restart(self) -> None:
        """One replica after the other, each when its requests have ended; the others serve meanwhile."""
        if len(self.replicas) == 1:
            raise InvalidRequest("one replica alone cannot be restarted without failing its requests")
        if self._restarting is not None and not self._restarting.done():
            raise InvalidRequest("the replicas are being restarted already")
        self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        for one in self.replicas:
            while not any(other.serves for other in self.replicas if other is not one):
                await asyncio.sleep(0.1)
            if one.serves:
                await one.supervisor.restart()
        log.info("the replicas were restarted")

    async def adopt(self, ready: Ready) -> None:
        """Takes over the limits of a process that is ready; it serves when this returns. ModelError: it has
        another model than the others."""
        async with self._adopting:
            if self.limits is None:
                # Now: the engine has fetched the files, and two must not do so at the same time.
                tokenizer = await asyncio.to_thread(tokenizer_of, self.config)
                if tokenizer is not None and self.chat_template is not None:
                    tokenizer = replace(tokenizer, chat_template=self.chat_template)
                self.tokenizer = tokenizer
                self.sampling_defaults = await asyncio.to_thread(sampling_defaults, self.config)
            # What is free differs from one to the other; a request is to fit wherever it is sent.
            all_limits = [one.status.limits for one in self.replicas if one.status.limits]
            least = {name: min(getattr(one, name) for one in all_limits) for name in BY_MEMORY}
            limits = replace(ready.limits, **least)
            if self.limits is not None and replace(self.limits, **least) != limits:
                raise ModelError(f"the replicas disagree: {self.limits} and {limits}")
            self.limits = limits
        log.info("sequences that may run and wait: %d (--max_concurrent_requests)", self.max_sequences)

    # ---- requests

    @asynccontextmanager
    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Generation]:
        """A request under way; leaving it before its end aborts it. Raises what is wrong with it."""
        self._check_ready()
        self.check_room(params.num_choices)
        timeline = Timeline(params.num_choices, params.max_tokens)
        with self.room.preparing(params.num_choices):
            if isinstance(prompt, str) and self.tokenizer and params.truncate_prompt_tokens is None:
                self.tokenizer.refuse_longer(prompt, self.max_len)
            # Long prompts take long to be cut into tokens and to be checked.
            prepare = partial(self._prepare, prompt, params, options)
            collector = await read(len(prompt) if isinstance(prompt, str) else 0, prepare)
        replica = self._replica_for(collector.request)
        with replica.requests.add(collector, timeline, self.request_timeout_s) as generation:
            yield generation

    def check_room(self, num_sequences: int) -> None:
        """Refuses what there is no room for, before anything is made for it, whether or not an engine
        answers: InvalidRequest, if there never is, else QueueFull."""
        self.room.check(num_sequences, self.max_sequences)

    def move(self, generation: Generation) -> bool:
        """To another replica, if there is one that takes it."""
        try:
            replica = self._replica_for(generation.collector.request)
            generation.has_moved = True
            replica.requests.send(generation)
        except HexError:
            return False
        return True

    def _replica_for(self, request: Request) -> Replica:
        """That serves, and has room for all of its choices."""
        self._check_ready()
        if len(self.replicas) == 1:
            return self.replicas[0]
        assert self.limits is not None
        most = self.limits.max_sequences - request.params.num_choices
        loads = {i: one.load for i, one in enumerate(self.replicas) if one.serves and one.load <= most}
        if not loads:
            raise QueueFull("no replica has room for so many sequences")
        return self.replicas[self.router.choose(request, self.limits, loads)]

    def forget(self, replica: Replica) -> None:
        """Its process has gone, and with it what its cache held."""
        self.router.forget(self.replicas.index(replica))

    def _check_ready(self) -> None:
        if not self.ready:
            raise EngineStopped(leading([one.status for one in self.replicas]).state.value)

    def _prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> OutputCollector:
        """Runs in a thread."""
        assert self.limits is not None
        request = make_request(
            request_id(self.front),
            self._encode(prompt) if isinstance(prompt, str) else prompt,
            params,
            self.limits,
            self.tokenizer,
            **options,
        )
        return OutputCollector(request, self.tokenizer, prompt if isinstance(prompt, str) else None)

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest.at(
                "prompt", "this server has no tokenizer (--skip_tokenizer_init); send token ids"
            )
        return self.tokenizer.encode(text)


def sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Of SamplingParams, for requests that do not say otherwise. ModelError: they cannot be used."""
    if (source := config.generation_config) in ("vllm", "none"):
        return {}
    if source == "auto" and config.model is None:
        return dict(default_model.SAMPLING)
    if source == "auto":
        path = fetch_for(config, config.model, config_only=True)
    elif not (path := Path(source).expanduser()).is_dir():
        raise ConfigError(f"--generation_config={source}: must be auto, vllm, none or a folder")
    return read_sampling_defaults(path) if path.is_dir() else {}


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    if config.skip_tokenizer_init:
        return None
    path = fetch_for(config, config.tokenizer or config.model, tokenizer_only=True)
    return open_tokenizer(path, config.tokenizer_mode)
