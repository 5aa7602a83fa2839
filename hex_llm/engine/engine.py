"""Engine: a book of requests and who steps it. Knows token ids, not text; one thread calls it."""

from __future__ import annotations

import msgspec

from hex_llm.admission import Limits
from hex_llm.config import EngineConfig
from hex_llm.engine.book import RequestBook
from hex_llm.engine.stepper import Stepper
from hex_llm.execution.runner import Runner
from hex_llm.ipc.stats import Stats
from hex_llm.models.spec import ModelSpec
from hex_llm.text.grammar import GrammarFactory
from hex_llm.types import Request, Update


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        runner: Runner,
        num_blocks: int,
        grammars: GrammarFactory | None = None,
    ) -> None:
        self.config, self.spec = config, spec
        self.stepper = Stepper(config, spec, runner, num_blocks)
        self.limits = Limits(
            spec.vocab_size,
            spec.max_len,
            self.stepper.scheduler.pool.num_usable,
            config.block_size,
            grammars is not None,
            config.max_sequences(spec.max_len),
            tuple(spec.eos_ids),
            config.allow_priority,
        )
        self.book = RequestBook(spec, self.limits, grammars, config.seed)
        self.memory = ""  # where it goes, in words, if who loaded the engine has noted it

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every shape that a step can have."""
        self.stepper.runner.warm_up(progress)

    def add(self, request: Request) -> None:
        """Accepts a request; raises InvalidRequest or QueueFull, and nothing was accepted then."""
        self.book.add(request, self.stepper.scheduler)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; one that has ended, or never was, is ignored."""
        self.book.abort(request_id)

    def stop(self, request_id: str, index: int) -> None:
        """Ends one choice as if it had come to a stop token: the reader of its text found a stop string."""
        self.book.stop(request_id, index)

    def step(self) -> list[Update]:
        """Sends the next step off, reads the one before it, and tells what that brought."""
        self.book.begin_compiled()
        if self.book.num_held:
            self.book.take_masks()
        if not (self.stepper.step(self.book) or self.book.has_updates):
            self.book.wait()
        return self.book.take_updates()

    @property
    def has_work(self) -> bool:
        return self.book.has_work or self.stepper.is_in_flight

    @property
    def is_compiling(self) -> bool:
        """Any thread may ask."""
        return self.stepper.runner.is_compiling

    @property
    def num_steps(self) -> int:
        return self.stepper.num_steps

    @property
    def stats(self) -> Stats:
        """After the last step."""
        stats = self.stepper.stats
        return msgspec.structs.replace(stats, num_waiting=stats.num_waiting + self.book.num_compiling)

    def check(self) -> None:
        """The invariants that hold between any two calls (blocks, slots, and the ledger of requests)."""
        scheduler = self.stepper.scheduler
        scheduler.check()
        self.book.check(scheduler.num_waiting + len(scheduler.running))
        if not self.has_work:
            assert scheduler.is_idle

    def check_idle(self) -> None:
        """A part of these that takes no time to speak of, for an engine that has nothing to do."""
        self.book.check_idle()
        self.stepper.scheduler.check_idle()
