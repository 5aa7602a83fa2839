"""Engine: schedule, send off, read, tell. Knows token ids, not text; one thread calls it.

Every request that `add` accepts gets exactly one end, told by the last Update of each of its choices.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec
import numpy as np

from hex_llm.config import EngineConfig
from hex_llm.engine.admission import Limits, check_request, max_len_of
from hex_llm.engine.batch import Ints
from hex_llm.engine.constraints import Constraint, Matcher
from hex_llm.engine.results import unpack_choice
from hex_llm.engine.runner import CompiledLate, InFlight, Runner
from hex_llm.engine.stats import Stats
from hex_llm.engine.work import Work
from hex_llm.errors import InvalidRequest
from hex_llm.models.spec import ModelSpec
from hex_llm.scheduling.blocks import BlockPool, root_key
from hex_llm.scheduling.scheduler import Scheduler, StepLimits
from hex_llm.scheduling.sequence import Sequence
from hex_llm.text.grammar import GrammarFactory
from hex_llm.types import FinishReason, Request, StepPlan, TokenLogprobs, Update

GRAMMAR_S = 8.0  # what compiling a request's grammar may take; text.grammar keeps it shorter by itself
POLL_S = 0.01
NO_TOKEN = "the model gave no finite score to any token that is allowed"


@dataclass(eq=False)
class Choice:
    """One choice of a request: its sequence, and what the engine knows besides."""

    sequence: Sequence
    seed: int
    constraint: Constraint
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(eq=False)
class Live:
    """A request that has not ended."""

    request: Request
    choices: list[Choice] = field(default_factory=list)  # empty while its grammar is being compiled
    reasons: dict[int, FinishReason] = field(default_factory=dict)  # of the choices that have ended
    matchers: Future[list[Matcher]] | None = None
    compiled_since: float | None = None  # when that was begun
    added: float = field(default_factory=time.monotonic)
    has_begun: bool = False  # a step has taken it in


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        runner: Runner,
        num_blocks: int,
        grammars: GrammarFactory | None = None,
    ) -> None:
        self.config, self.spec, self.runner = config, spec, runner
        pool = BlockPool(num_blocks, config.block_size)
        self.scheduler = Scheduler(pool, StepLimits.of(config, spec.max_len))
        self.limits = Limits(
            spec.vocab_size,
            spec.max_len,
            pool.num_usable,
            config.block_size,
            grammars is not None,
            config.max_sequences(spec.max_len),
        )
        self.num_steps = 0
        self.memory = ""  # where it goes, in words, if who loaded the engine has noted it
        self.ledger: Counter[str] = Counter()  # accepted, and one of finished, aborted, error for each
        self._grammars = grammars
        self._compilers = ThreadPoolExecutor(1, "grammar")  # one is tried out at a time
        self._live: dict[str, Live] = {}
        self._choices: dict[Sequence, Choice] = {}
        self._in_flight: deque[tuple[InFlight, list[Sequence]]] = deque()
        self._updates: list[Update] = []
        self._num_padding = 0
        self._work, self._num_flops = Work.of(spec), 0.0
        self._step = Stats()  # what the present step has noted so far

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every shape that a step can have."""
        self.runner.warm_up(progress)

    # ---- requests

    def add(self, request: Request) -> None:
        """Accepts a request; raises InvalidRequest or QueueFull, and nothing was accepted then."""
        check_request(request, self.limits)
        if request.request_id in self._live:
            raise InvalidRequest("request_id: it is in use", "request_id")
        compiling = sum(live.request.params.num_choices for live in self._live.values() if not live.choices)
        self.scheduler.check_room(request.params.num_choices + compiling)
        self.ledger["accepted"] += 1
        live = self._live[request.request_id] = Live(request)
        if request.params.structured_outputs is None:
            self._begin(live, [None] * request.params.num_choices)
        else:
            live.matchers = self._compilers.submit(self._compile, request)

    def abort(self, request_id: str) -> None:
        """Ends a request at once; one that has ended, or never was, is ignored."""
        if live := self._live.get(request_id):
            self._end_all(live, FinishReason.ABORT)

    def stop(self, request_id: str, index: int) -> None:
        """Ends one choice as if it had come to a stop token: the reader of its text found a stop string."""
        live = self._live.get(request_id)
        if live and index < len(live.choices) and index not in live.reasons:
            self._end(live, index, FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._in_flight or self._updates)

    @property
    def is_compiling(self) -> bool:
        """Any thread may ask."""
        return self.runner.is_compiling

    # ---- the loop

    def step(self) -> list[Update]:
        """Sends the next step off, reads the one before it, and tells what that brought."""
        self._step = Stats()
        self._begin_compiled()
        with self._timed("schedule_s"), self.runner.recorder.phase("schedule"):
            plan, sequences = self.scheduler.schedule()
        if sequences:
            self._send_off(plan, sequences)
        if self._in_flight and len(self._in_flight) > (self.config.async_scheduling if sequences else 0):
            self._read(*self._in_flight.popleft())
        updates, self._updates = self._updates, []
        if not self.has_work:
            self.check()
        return updates

    @property
    def stats(self) -> Stats:
        """After the last step."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return msgspec.structs.replace(
            self._step,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting + self._step.num_waiting,
            num_blocks=pool.num_usable,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_preemptions=scheduler.num_preemptions,
            num_late_compiles=self.runner.num_late_compiles,
            num_padding=self._num_padding,
            num_flops=self._num_flops / self.config.tensor_parallel_size,
        )

    def check(self) -> None:
        """The invariants that hold between any two calls (blocks, slots, and the ledger of requests)."""
        self.scheduler.check()
        ended = self.ledger["finished"] + self.ledger["aborted"] + self.ledger["error"]
        assert self.ledger["accepted"] == ended + len(self._live), f"a request is lost: {self.ledger}"
        open_choices = {
            c.sequence
            for live in self._live.values()
            for i, c in enumerate(live.choices)
            if i not in live.reasons
        }
        assert open_choices == set(self._choices)
        assert len(open_choices) == self.scheduler.num_waiting + len(self.scheduler.running)
        if not self.has_work:
            assert self.scheduler.is_idle

    def _send_off(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        try:
            with self._timed("dispatch_s"):
                self._write_slots(plan, sequences)
                sent = self.runner.dispatch(plan)
            self._in_flight.append((sent, sequences))
            self.num_steps += 1
            self._step.num_tokens = sum(chunk.num_tokens for chunk in plan.chunks)
            self._num_padding += sent.shape.num_tokens - self._step.num_tokens
            self._num_flops += self._work.in_step(plan.chunks)
        except CompiledLate as error:
            for sequence in sequences:
                self._fail(sequence, str(error))
            self.scheduler.collect(plan, sequences, [-1] * len(sequences))  # in vain: all of them have ended

    def _read(self, step: InFlight, sequences: list[Sequence]) -> None:
        with self._timed("wait_s"):
            chosen = self.runner.read(step)
        with self.runner.recorder.phase("tell"):
            self._keep_prompt_logprobs(step, sequences)
            for row in self.scheduler.collect(step.plan, sequences, chosen[:, 0].tolist()):
                self._tell(sequences[row], chosen[row])

    # ---- what the devices are told about sequences

    def _write_slots(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        records: list[tuple[int, Ints]] = []
        words: list[tuple[int, Ints]] = []
        for chunk, sequence in zip(plan.chunks, sequences, strict=True):
            choice = self._choices[sequence]
            with self._failing(sequence):
                if not sequence.slot_is_written:
                    self._note_begin(self._live[sequence.request_id])
                    records.append((chunk.slot, self._record(choice)))
                    sequence.slot_is_written = True
                elif chunk.samples and choice.constraint.is_needed:
                    changed = choice.constraint.changed_words(sequence.token_ids, chunk.end)
                    if changed is not None:
                        words.append((chunk.slot, changed))
        self.runner.write_slots(records)
        self.runner.write_allowed(words)

    def _record(self, choice: Choice) -> Ints:
        sequence, constraint = choice.sequence, choice.constraint
        allowed = constraint.words(sequence.token_ids, sequence.length) if constraint.is_needed else None
        num_prompt = len(sequence.prompt_ids)
        return self.runner.layout.record(
            sequence.params, choice.seed, num_prompt, sequence.token_ids, allowed
        )

    # ---- what came of a step

    def _tell(self, sequence: Sequence, chosen: Ints) -> None:
        choice, live = self._choices[sequence], self._live[sequence.request_id]
        if sequence.finish_reason is FinishReason.ERROR:
            self._end(live, sequence.index, FinishReason.ERROR, NO_TOKEN)
            return
        token_id = sequence.token_ids[-1]
        update = Update(sequence.request_id, sequence.index, [token_id], num_cached=sequence.num_cached or 0)
        if sequence.params.logprobs is not None:
            update.logprobs = [unpack_choice(chosen, sequence.params.logprobs)]
        update.prompt_logprobs, choice.prompt_logprobs = choice.prompt_logprobs, []
        self._updates.append(update)
        if sequence.finish_reason is not None:
            if sequence.finish_reason is FinishReason.STOP and token_id not in self.spec.eos_ids:
                update.stop_token_id = token_id
            self._note_end(live, choice, sequence.finish_reason, update)
        elif choice.constraint.matcher is not None:
            self._follow(live, choice, token_id)

    def _follow(self, live: Live, choice: Choice, token_id: int) -> None:
        matcher = choice.constraint.matcher
        assert matcher is not None
        with self._failing(choice.sequence):
            if not matcher.accept(token_id):
                self._fail(choice.sequence, f"token {token_id} does not follow the grammar")
            elif matcher.stopped:
                self._end(live, choice.sequence.index, FinishReason.STOP)

    def _keep_prompt_logprobs(self, step: InFlight, sequences: list[Sequence]) -> None:
        for row in range(len(step.plan.decodes), len(sequences)):
            sequence, chunk = sequences[row], step.plan.chunks[row]
            wanted, prompt = sequence.params.prompt_logprobs, sequence.prompt_ids
            choice = self._choices.get(sequence)
            # Only one choice tells them, and not again when it is computed anew after a preemption.
            if (
                wanted is None
                or choice is None
                or sequence.index > 0
                or len(sequence.token_ids) > len(prompt)
            ):
                continue
            following = np.array(prompt[chunk.position + 1 : chunk.end + 1], np.int32)
            found = self.runner.prompt_logprobs(step, row, following, wanted)
            choice.prompt_logprobs[chunk.position :] = found

    # ---- what is told of the engine itself

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            setattr(self._step, name, time.perf_counter() - started)

    def _note_begin(self, live: Live) -> None:
        if not live.has_begun:
            live.has_begun = True
            self._step.waited.append((live.request.request_id, time.monotonic() - live.added))

    # ---- how requests begin and end

    def _begin(self, live: Live, matchers: list[Matcher] | list[None]) -> None:
        request, params = live.request, live.request.params
        ends = not params.ignore_eos or params.structured_outputs is not None
        stop_ids = frozenset(params.stop_token_ids) | frozenset(self.spec.eos_ids if ends else ())
        seed = self._seed(request)
        for index, matcher in enumerate(matchers):
            constraint = Constraint(request, stop_ids, self.spec.vocab_size, matcher)
            sequence = Sequence(
                request.request_id,
                request.prompt_ids,
                params,
                stop_ids,
                max_len_of(request, self.limits),
                index,
                request.priority,
                recompute_len=self.spec.recompute_len,
                # Who wants the prompt's log-probabilities needs all of it computed.
                cache_key=root_key(request.cache_salt) if params.prompt_logprobs is None else None,
                cache_len=self.spec.uniform_len,
                waits_for_tokens=constraint.follows_tokens,
            )
            choice = Choice(sequence, (seed + index) % 2**64, constraint)
            live.choices.append(choice)
            self._choices[sequence] = choice
            self.scheduler.add(sequence)

    def _seed(self, request: Request) -> int:
        """The request's own, or one that differs from request to request and follows from --seed."""
        if request.params.seed is not None:
            return request.params.seed % 2**64
        drawn = sha256(f"{self.config.seed} {self.ledger['accepted']}".encode()).digest()
        return int.from_bytes(drawn[:8])

    def _compile(self, request: Request) -> list[Matcher]:
        """Runs in a thread of its own."""
        assert self._grammars is not None
        assert request.params.structured_outputs is not None
        first = self._grammars.compile(request.params.structured_outputs)
        return [first, *(first.copy() for _ in range(1, request.params.num_choices))]

    def _begin_compiled(self) -> None:
        """Lets requests run whose grammars are ready; ends those whose are not in time."""
        compiling = [live for live in self._live.values() if live.matchers is not None]
        if compiling and self.scheduler.is_idle:  # nothing else to do: do not spin
            wait([live.matchers for live in compiling if live.matchers], POLL_S, "FIRST_COMPLETED")
        for live in compiling:
            assert live.matchers is not None
            if live.matchers.done():
                matchers, live.matchers = live.matchers, None
                try:
                    self._begin(live, matchers.result())
                except Exception as error:  # whatever its grammar does to us, it ends that request only
                    self._end_all(live, FinishReason.ERROR, str(error), "structured_outputs")
            elif live.matchers.running():
                live.compiled_since = live.compiled_since or time.monotonic()
                if time.monotonic() > live.compiled_since + GRAMMAR_S:
                    message = f"structured_outputs: compiling it takes longer than {GRAMMAR_S:g} s"
                    self._end_all(live, FinishReason.ERROR, message, "structured_outputs")
        self._step.num_waiting = sum(
            live.request.params.num_choices for live in compiling if live.matchers is not None
        )

    @contextmanager
    def _failing(self, sequence: Sequence) -> Iterator[None]:
        """An exception that a request's own data causes ends that request only."""
        try:
            yield
        except Exception as error:
            param = error.param if isinstance(error, InvalidRequest) else None
            self._fail(sequence, str(error) or type(error).__name__, param)

    def _fail(self, sequence: Sequence, message: str, param: str | None = None) -> None:
        live = self._live.get(sequence.request_id)
        if live is not None and sequence.index not in live.reasons:
            self._end(live, sequence.index, FinishReason.ERROR, message, param)

    def _end_all(self, live: Live, reason: FinishReason, error: str = "", param: str | None = None) -> None:
        if live.matchers is not None:
            live.matchers.cancel()
        for index in range(live.request.params.num_choices):
            if index not in live.reasons:
                self._end(live, index, reason, error, param)

    def _end(
        self, live: Live, index: int, reason: FinishReason, error: str = "", param: str | None = None
    ) -> None:
        """Ends a choice, told by an update of its own."""
        update = Update(live.request.request_id, index, error=error, param=param)
        self._updates.append(update)
        choice = live.choices[index] if live.choices else None
        if choice is not None and choice.sequence.finish_reason is None:
            self.scheduler.finish(choice.sequence, reason)
        self._note_end(live, choice, reason, update)

    def _note_end(self, live: Live, choice: Choice | None, reason: FinishReason, update: Update) -> None:
        update.finish_reason = reason
        live.reasons[update.index] = reason
        if choice is not None:
            del self._choices[choice.sequence]
        if len(live.reasons) == live.request.params.num_choices:
            del self._live[live.request.request_id]
            reasons = set(live.reasons.values())
            bad = {FinishReason.ERROR: "error", FinishReason.ABORT: "aborted"}
            self.ledger[next((name for r, name in bad.items() if r in reasons), "finished")] += 1
