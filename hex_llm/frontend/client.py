"""The front end's side of an engine process: takes requests, and gives their outputs.

Lives in one event loop. Text is made here, so that the engine's process only steps. Every request gets one
end: its output, an InvalidRequest, QueueFull, TimedOut or EngineStopped. No jax.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Unpack

from hex_llm.admission import Limits, make_request
from hex_llm.config import EngineConfig
from hex_llm.errors import ConfigError, EngineStopped, InvalidRequest
from hex_llm.frontend.beside import read
from hex_llm.frontend.outputs import OutputCollector
from hex_llm.frontend.process import Supervisor
from hex_llm.frontend.requests import Generation, OpenRequests, Statistics, Timeline
from hex_llm.ipc.protocol import Ready, Refused, Step
from hex_llm.ipc.stats import EngineState, EngineStatus
from hex_llm.sampling_params import SamplingParams
from hex_llm.text.tokenizer import Tokenizer
from hex_llm.types import Pooling, RequestOptions
from hex_llm.weights.adapter_source import AdapterNames
from hex_llm.weights.model_files import open_tokenizer, read_sampling_defaults
from hex_llm.weights.source import fetch_for, pinned

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "hex_llm.engine.worker")


class EngineClient:
    """An engine in a process of its own. `limits` and `tokenizer` are known once it is ready.

    The observer of its `statistics`, `log_format` and the timeouts may be set before the start.
    """

    limits: Limits | None = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None  # instead of the tokenizer's
    sampling_defaults: Mapping[str, Any] = MappingProxyType({})  # of the model's generation_config.json

    def __init__(self, config: EngineConfig, model_name: str = "", command: Sequence[str] = WORKER) -> None:
        self.config = config
        self.adapters = AdapterNames(config)
        self.model_name = model_name
        self.log_format = "text"
        self.request_timeout_s = 0.0  # what a request may take in all; 0: any
        self.stuck_timeout_s = 20.0  # that the engine may be silent
        self.step_timeout_s = 300.0  # for a step; 0: any
        self.engine_status = EngineStatus()
        self.statistics = Statistics()
        self.supervisor = Supervisor(self, command)
        self.requests = OpenRequests(self.supervisor.send, self.engine_status, self.statistics)

    @property
    def ready(self) -> bool:
        return self.engine_status.state is EngineState.SERVING

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
        """That may be waiting and running."""
        assert self.limits is not None, "not loaded yet"
        return self.limits.max_sequences

    # ---- the process

    async def start(self) -> None:
        """Returns when the engine is ready; raises why it could not be loaded, and nothing is left then."""
        # Once: the tokenizer and the engines that follow this one are of the same version of the model.
        self.config = await asyncio.to_thread(pinned, self.config)
        await self.supervisor.start()

    async def stop(self, timeout_s: float) -> None:
        """Ends the process: after its present step or, if that or loading takes longer, at once."""
        self.fail(EngineState.STOPPED)
        await self.supervisor.stop(timeout_s)

    def fail(self, state: EngineState) -> None:
        """Ends every request, and all that are still to come, with EngineStopped."""
        self.engine_status.state = state
        self.requests.fail(state.value)

    async def adopt(self, ready: Ready) -> None:
        """Takes over the limits of a process that is ready; it serves when this returns."""
        if self.limits is None:
            # Now: the engine has fetched the files, and two must not do so at the same time.
            tokenizer = await asyncio.to_thread(tokenizer_of, self.config)
            if tokenizer is not None and self.chat_template is not None:
                tokenizer = replace(tokenizer, chat_template=self.chat_template)
            self.tokenizer = tokenizer
            self.sampling_defaults = await asyncio.to_thread(sampling_defaults, self.config)
        self.limits, self.engine_status.memory = ready.limits, ready.memory
        self.engine_status.limits = ready.limits
        log.info("sequences that may run and wait: %d (--max_concurrent_requests)", self.max_sequences)

    async def take(self, report: Step | Refused, *, is_behind: bool) -> None:
        """`is_behind`: more reports have come already."""
        await self.requests.take(report, is_behind=is_behind)

    # ---- requests

    @asynccontextmanager
    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Generation]:
        """A request under way; leaving it before its end aborts it. Raises what is wrong with it."""
        self._check_ready()
        self.check_room(params.num_choices)
        timeline = Timeline(params.num_choices, params.max_tokens)
        with self.requests.room.preparing(params.num_choices):
            if isinstance(prompt, str) and self.tokenizer and params.truncate_prompt_tokens is None:
                self.tokenizer.refuse_longer(prompt, self.max_len)
            # Long prompts take long to be cut into tokens and to be checked.
            prepare = partial(self._prepare, prompt, params, options)
            collector = await read(len(prompt) if isinstance(prompt, str) else 0, prepare)
        self._check_ready()
        with self.requests.add(collector, timeline, self.request_timeout_s) as generation:
            yield generation

    def check_room(self, num_sequences: int) -> None:
        """Refuses what there is no room for, before anything is made for it, whether or not the engine
        answers: InvalidRequest, if there never is, else QueueFull."""
        self.requests.room.check(num_sequences, self.max_sequences)

    def _check_ready(self) -> None:
        if not self.ready:
            raise EngineStopped(self.engine_status.state.value)

    def _prepare(
        self, prompt: str | Sequence[int], params: SamplingParams, options: RequestOptions
    ) -> OutputCollector:
        """Runs in a thread. Ids are ours: who knew another's could abort it."""
        assert self.limits is not None
        request = make_request(
            uuid.uuid4().hex,
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
        return {}  # the embedded model has none
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
