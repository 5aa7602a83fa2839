"""Separate prefill and decode: some runners take prompts in, others go on with them, each on devices of its
own with weights, pages and slots of its own, here or in a process on another host.

Who has been prefilled and has its first token moves: its blocks are taken on the one side, travel, and are
put down on the other only when they are there, so that no decode waits for a prefill. While there is no room
for it there, it keeps what it holds, and at last nobody new is admitted. Who must be computed anew goes back.
A group elsewhere that is lost ends those who ran there; who waits, waits for others, or for its return.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import jax
import msgspec

from hex_llm.engine.book import RequestBook
from hex_llm.engine.engine import Stepper, Watched
from hex_llm.engine.groups import RemoteGroup, end_all
from hex_llm.errors import EngineStopped, ModelError
from hex_llm.execution.elsewhere import GONE, Drop, Put, RemoteRunner, Take
from hex_llm.execution.messages import Address, Answer, Came
from hex_llm.execution.moving import Post
from hex_llm.execution.programs import Pages
from hex_llm.execution.runner import Runner, is_there
from hex_llm.ipc.stats import Stats, summed
from hex_llm.scheduling.scheduler import Scheduler
from hex_llm.scheduling.sequence import Sequence, State

log = logging.getLogger(__name__)

PAUSE_S = 1e-4  # between two looks at what the devices have ended
TURN_S = 0.005  # after which requests are taken in again
STEP_S = 300.0  # after which a group is taken for stuck whose process lives but does not end a step
MOVE_S = 120.0  # after which blocks that have not come are given up: what they were sent by was cut off


@dataclass(eq=False)
class Move:
    """A sequence whose blocks are on their way."""

    sequence: Sequence
    source: Stepper
    to: Stepper
    blocks: list[int]
    contents: Pages | None = None  # None: between processes
    is_there: bool = False
    is_lost: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def has_come(self) -> bool:
        if self.contents is None:
            return self.is_there
        return all(map(is_there, jax.tree.leaves(self.contents)))


class SeparateSteppers:
    def __init__(self, prefilling: list[Stepper], decoding: list[Stepper]) -> None:
        self.prefilling, self.decoding = prefilling, decoding
        self._moves: dict[int, Move] = {}  # by their parcels' numbers
        self._parcels = count(1)
        self._groups: dict[Stepper, RemoteGroup] = {}
        self._post: Post | None = None
        for one in prefilling:
            one.scheduler.hands_over = True

    def connect(self, groups: dict[Stepper, RemoteGroup], post: Post) -> None:
        """With the processes of those steppers whose devices are elsewhere."""
        self._groups, self._post = groups, post
        for stepper, group in groups.items():
            group.take = partial(self._take_in, stepper)

    @property
    def steppers(self) -> list[Stepper]:
        return self.prefilling + self.decoding

    @property
    def scheduler(self) -> Scheduler:
        """The one with the least to do."""
        return min((one.scheduler for one in _up(self.prefilling) or self.prefilling), key=_load)

    @property
    def is_in_flight(self) -> bool:
        return bool(self._moves) or any(one.is_in_flight for one in self.steppers)

    @property
    def patience_s(self) -> float:
        return 0.0  # each has its turn in `step`

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
            self.tend(book)
            is_busy |= self._move(book)
            for one in _up(self.steppers):
                if one.can_send:
                    is_busy |= one.send_next(book)
                if one.can_read:
                    one.read_next(book)
                    is_busy = True
            if not (is_busy or self.is_in_flight) and len(_up(self.steppers)) < len(self.steppers):
                time.sleep(TURN_S)  # who could go on waits for a group to come back
            if book.has_updates or not self.is_in_flight or time.monotonic() > until:
                return is_busy or self.is_in_flight
            time.sleep(PAUSE_S)

    def _move(self, book: RequestBook) -> bool:
        """Whether anything has moved."""
        is_busy, prefilling = False, _up(self.prefilling)
        for one in self.steppers if prefilling else ():
            if one not in prefilling:
                for sequence in one.scheduler.take_waiting():
                    self._note(book, sequence, self.scheduler).wait_again(sequence)
        for one in prefilling:
            for sequence in one.scheduler.movable():
                to = min(_up(self.decoding), key=lambda one: _load(one.scheduler), default=None)
                if to is None or (blocks := one.scheduler.hand_over(sequence, to.scheduler)) is None:
                    break
                self._note(book, sequence, to.scheduler)
                parcel, move = next(self._parcels), Move(sequence, one, to, blocks[1])
                self._moves[parcel] = move  # before it can come
                move.contents = self._send(parcel, one, to, blocks[0])
                is_busy = True
        for parcel, move in list(self._moves.items()):
            is_busy |= self._end_move(book, parcel, move)
        return is_busy

    def _send(self, parcel: int, source: Stepper, to: Stepper, blocks: list[int]) -> Pages | None:
        """What they hold, if it travels from device to device."""
        if isinstance(source.runner, RemoteRunner):
            source.runner.tell(Take(parcel, self._address_of(to), blocks))
            return None
        assert isinstance(source.runner, Runner)
        taken = source.runner.take_blocks(blocks)
        if isinstance(to.runner, Runner):
            return to.runner.pages_from(taken)
        self._here.send(parcel, self._address_of(to), taken, len(blocks))
        return None

    def _end_move(self, book: RequestBook, parcel: int, move: Move) -> bool:
        """Whether it has ended: the blocks are put down, or nobody wants them any more."""
        sequence, has_come = move.sequence, move.has_come
        if not has_come and (move.is_lost or time.monotonic() > move.began + MOVE_S):
            book.fail(sequence, EngineStopped(GONE))
        if not has_come and sequence.finish_reason is None:
            return False
        del self._moves[parcel]
        runner, is_wanted = move.to.runner, sequence.finish_reason is None  # else the blocks are others' now
        if isinstance(runner, RemoteRunner):
            runner.tell(Put(parcel, move.blocks) if is_wanted else Drop(parcel))
        elif is_wanted:
            assert isinstance(runner, Runner)
            runner.put_blocks(move.blocks, move.contents or self._here.take(parcel))
        elif move.contents is None:
            self._here.drop(parcel)
        if is_wanted:
            sequence.move_to(State.DECODING)
        return True

    @property
    def _here(self) -> Post:
        assert self._post is not None, "all groups are here"
        return self._post

    def _address_of(self, stepper: Stepper) -> Address:
        group = self._groups.get(stepper)
        if group is None:
            return Address(self.steppers.index(stepper), self._here.url)
        assert group.loaded is not None
        return Address(group.index, group.loaded.url)

    def _note(self, book: RequestBook, sequence: Sequence, scheduler: Scheduler) -> Scheduler:
        choice = book.choice_of(sequence)
        assert choice is not None, "who has ended does not move"
        choice.scheduler = scheduler
        return scheduler

    # ---- groups elsewhere

    @property
    def watched(self) -> list[Watched]:
        return [one for group in self._groups.values() for one in group.watched]

    def tend(self, book: RequestBook) -> None:
        """Takes in what they tell. One that is lost ends its requests, and is started again."""
        for stepper, group in self._groups.items():
            group.listen(0)
            runner = stepper.runner
            assert isinstance(runner, RemoteRunner)
            if runner.is_up and (waiting_s := runner.waiting_s) > STEP_S:
                group.fail(ModelError(f"group {group.index} has been at one step for {waiting_s:.0f} s"))
            if not group.is_running:
                self._lose(book, stepper, runner)
                if group.may_start:
                    log.error("%s: it is started again", group.error)
                    group.start()
            elif not runner.is_up and group.warm is not None:
                self._welcome(book, stepper, runner, group)

    def note_parcel(self, parcel: int, is_whole: bool) -> None:
        """It has come, or never will; any thread may tell."""
        if (move := self._moves.get(parcel)) is not None:
            move.is_there, move.is_lost = is_whole, not is_whole

    def close(self) -> None:
        end_all(list(self._groups.values()))
        if self._post is not None:
            self._post.close()

    def _take_in(self, stepper: Stepper, told: Answer | Came) -> None:
        assert isinstance(stepper.runner, RemoteRunner)
        if isinstance(told, Answer):
            stepper.runner.take_in(told)
        else:
            self.note_parcel(told.parcel, told.is_whole)

    def _lose(self, book: RequestBook, stepper: Stepper, runner: RemoteRunner) -> None:
        runner.is_up = False
        stepper.lose(book, EngineStopped(GONE))
        for move in self._moves.values():
            move.is_lost |= move.source is stepper

    def _welcome(self, book: RequestBook, stepper: Stepper, runner: RemoteRunner, group: RemoteGroup) -> None:
        assert group.loaded is not None
        assert group.warm is not None
        if not runner.fits(group.loaded):
            group.fail(ModelError(f"group {group.index} has come back with other limits"))
            return
        log.info("group %d is back", group.index)
        runner.begin_anew()
        stepper.note_times(group.warm.seconds)
        runner.is_up = True
        book.place_adapters(runner)


def _up(steppers: list[Stepper]) -> list[Stepper]:
    return [one for one in steppers if one.runner.is_up]


def _load(scheduler: Scheduler) -> int:
    return scheduler.num_waiting + len(scheduler.running)
