"""Separate prefill and decode: some runners take prompts in, others go on with them, each on devices of its
own with weights, pages and slots of its own.

Who has been prefilled and has its first token moves: its blocks are taken on the one side, travel, and are
put down on the other only when they are there, so that no decode waits for a prefill. While there is no room
for it there, it keeps what it holds, and at last nobody new is admitted. Who must be computed anew goes back.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import msgspec

from hex_llm.engine.book import RequestBook
from hex_llm.engine.engine import Stepper
from hex_llm.execution.programs import Pages
from hex_llm.execution.runner import Runner, is_there
from hex_llm.ipc.stats import Stats, summed
from hex_llm.scheduling.scheduler import Scheduler
from hex_llm.scheduling.sequence import Sequence, State

PAUSE_S = 1e-4  # between two looks at what the devices have ended
TURN_S = 0.005  # after which requests are taken in again


class Move(NamedTuple):
    """A sequence whose blocks are on their way."""

    sequence: Sequence
    to: Stepper
    blocks: list[int]
    contents: Pages


class SeparateSteppers:
    def __init__(self, prefilling: list[Stepper], decoding: list[Stepper]) -> None:
        self.prefilling, self.decoding = prefilling, decoding
        self._moves: list[Move] = []
        for one in prefilling:
            one.scheduler.hands_over = True

    @property
    def steppers(self) -> list[Stepper]:
        return self.prefilling + self.decoding

    @property
    def runner(self) -> Runner:
        return self.prefilling[0].runner

    @property
    def scheduler(self) -> Scheduler:
        """The one with the least to do."""
        return min((one.scheduler for one in self.prefilling), key=_load)

    @property
    def is_in_flight(self) -> bool:
        return bool(self._moves) or any(one.is_in_flight for one in self.steppers)

    @property
    def num_steps(self) -> int:
        return sum(one.num_steps for one in self.steppers)

    @property
    def stats(self) -> Stats:
        each = [one.stats for one in self.steppers]
        waited = [one for stats in each for one in stats.waited]
        prefilling = sum(len(one.scheduler.running) for one in self.prefilling)
        return msgspec.structs.replace(summed(each), waited=waited, num_prefilling=prefilling)

    def step(self, book: RequestBook) -> bool:
        """Until there is something to tell, or nothing in flight, or others should have their turn."""
        until, is_busy = time.monotonic() + TURN_S, False
        while True:
            is_busy |= self._move(book)
            for one in self.steppers:
                if one.can_send:
                    is_busy |= one.send_next(book)
                if one.can_read:
                    one.read_next(book)
                    is_busy = True
            if book.has_updates or not self.is_in_flight or time.monotonic() > until:
                return is_busy or self.is_in_flight
            time.sleep(PAUSE_S)

    def _move(self, book: RequestBook) -> bool:
        """Whether anything has moved."""
        num_moves = len(self._moves)
        for one in self.decoding:
            for sequence in one.scheduler.take_waiting():
                self._note(book, sequence, self.scheduler).wait_again(sequence)
        for one in self.prefilling:
            for sequence in one.scheduler.movable():
                to = min(self.decoding, key=lambda decoder: _load(decoder.scheduler))
                if (blocks := one.scheduler.hand_over(sequence, to.scheduler)) is None:
                    break
                self._note(book, sequence, to.scheduler)
                contents = one.runner.take_blocks(blocks[0], to.runner.mesh)
                self._moves.append(Move(sequence, to, blocks[1], contents))
        has_begun = len(self._moves) > num_moves
        there = [move for move in self._moves if _has_come(move)]
        self._moves = [move for move in self._moves if move not in there]
        for sequence, to, held, contents in there:
            if sequence.finish_reason is None:  # else the blocks are not its own any more
                to.runner.put_blocks(held, contents)
                sequence.move_to(State.DECODING)
        return has_begun or bool(there)

    def _note(self, book: RequestBook, sequence: Sequence, scheduler: Scheduler) -> Scheduler:
        choice = book.choice_of(sequence)
        assert choice is not None, "who has ended does not move"
        choice.scheduler = scheduler
        return scheduler


def _load(scheduler: Scheduler) -> int:
    return scheduler.num_waiting + len(scheduler.running)


def _has_come(move: Move) -> bool:
    return move.sequence.finish_reason is not None or all(map(is_there, jax.tree.leaves(move.contents)))
