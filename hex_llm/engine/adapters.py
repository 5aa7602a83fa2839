"""Adapters between the places that they come from and the devices: loaded beside the step loop, kept in the
host's memory, and placed in slots for as long as requests use them.

The engine's thread calls all that is public; loading and copying run in threads. An adapter is known by the
digest of its bytes: where these change, it is another one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

from hex_llm.config import EngineConfig
from hex_llm.errors import InvalidRequest, ModelError, SourceError, UnknownModel
from hex_llm.execution.adapters import AdapterLayout, HostAdapter
from hex_llm.execution.step_runner import StepRunner
from hex_llm.models.adapters import Slots
from hex_llm.types import AdapterRef
from hex_llm.weights.adapter_source import AdapterNames, Stamp, adapter_folder, read_files, stamp_of, unknown
from hex_llm.weights.adapters import parse_adapter

NUM_LOADERS = 8  # threads
REMOTE_S = 60.0  # after which a bucket or the hub is asked again whether an adapter has changed
MAX_KNOWN = 10_000  # places
MAX_WAITING = 64  # adapters that take up the host's memory until a slot is free


class Known(NamedTuple):
    """What was found at a place."""

    stamp: Stamp
    digest: str
    looked: float


@dataclass(eq=False)
class Slot:
    number: int  # from 1
    adapter: HostAdapter | None = None
    num_users: int = 0  # requests
    staged: Future[list[Slots]] | None = None  # while it is on its way to the devices of each runner
    used: float = 0.0  # when it was last taken


class AdapterPool:
    def __init__(self, config: EngineConfig, layout: AdapterLayout, runners: Sequence[StepRunner]) -> None:
        """A slot is the same adapter's on all runners, whose layouts differ in their devices alone."""
        self._config, self._layout, self._runners = config, layout, runners
        self._names = AdapterNames(config)
        self._slots = [Slot(i) for i in range(1, self._layout.num_slots + 1)]
        self._loaders = ThreadPoolExecutor(NUM_LOADERS, "adapters")
        self._copier = ThreadPoolExecutor(1, "copier")
        # Of what follows, threads change all.
        self._lock = threading.Lock()
        self._loading: set[str] = set()  # places
        self._next: dict[str, tuple[AdapterRef, Future[HostAdapter]]] = {}  # to be looked at later
        self._known: dict[str, Known] = {}
        self._kept: OrderedDict[str, HostAdapter] = OrderedDict()  # by digest, the longest unused first
        self._alive: WeakValueDictionary[str, HostAdapter] = WeakValueDictionary()  # those in slots, too

    # ---- from files to the host's memory

    def load(self, ref: AdapterRef) -> Future[HostAdapter]:
        """As it is now. Those who ask for the same one meanwhile share the answer, unless it was looked at
        before they asked: it may have changed since."""
        with self._lock:
            _, done = self._next.setdefault(ref.source, (ref, Future()))
            self._start_next()
            return done

    def go_on(self) -> None:
        """Lets those be loaded for whom there is room now."""
        with self._lock:
            self._start_next()

    def _start_next(self) -> None:
        """In their order; those that are here already need no room."""
        in_slots = {slot.adapter.digest for slot in self._slots if slot.adapter}
        room = MAX_WAITING - len(self._loading) - len(self._alive.keys() - self._kept.keys() - in_slots)
        for source in [one for one in self._next if one not in self._loading]:
            known = self._known.get(source)
            is_here = known is not None and known.digest in self._alive
            if room > 0 or is_here:
                room -= not is_here
                self._loading.add(source)
                self._loaders.submit(self._run, *self._next.pop(source))

    def _run(self, ref: AdapterRef, done: Future[HostAdapter]) -> None:
        try:
            done.set_result(self._load(ref))
        except Exception as error:
            done.set_exception(error)
        with self._lock:
            self._loading.discard(ref.source)
            self._start_next()

    def _load(self, ref: AdapterRef) -> HostAdapter:
        try:
            if not self._names.allows(ref.source):
                raise SourceError("adapters are not taken from there")
            return self._loaded(ref.source)
        except SourceError as error:
            if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                raise unknown(ref.name) from error
            raise UnknownModel(f"the adapter `{ref.name:.80}`: {error}", "model") from error
        except ModelError as error:
            raise InvalidRequest(f"the adapter `{ref.name:.80}`: {error}", "model") from error

    def _loaded(self, source: str) -> HostAdapter:
        known, now = self._known.get(source), time.monotonic()
        is_fresh = known is not None and not source.startswith("/") and now - known.looked < REMOTE_S
        if known and is_fresh and (adapter := self._keep(known.digest)):
            return adapter
        layout = self._layout
        with adapter_folder(self._config, source, layout.max_bytes) as folder:
            stamp = stamp_of(folder)
            if known and known.stamp == stamp and (adapter := self._keep(known.digest)):
                self._note(source, Known(stamp, known.digest, now))
                return adapter
            data = read_files(folder, self._names.roots(source), layout.max_bytes)
        parsed = parse_adapter(*data, layout.max_rank, layout.dtype)
        adapter = self._keep(parsed.digest) or self._keep(parsed.digest, layout.on_host(parsed))
        assert adapter is not None
        self._note(source, Known(stamp, parsed.digest, now))
        return adapter

    def _note(self, source: str, known: Known) -> None:
        with self._lock:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[source] = known

    def _keep(self, digest: str, new: HostAdapter | None = None) -> HostAdapter | None:
        """The one with this digest, if it is anywhere, as the last that is given up."""
        with self._lock:
            adapter = self._alive.get(digest) or new
            if adapter is not None:
                self._alive[digest] = self._kept[digest] = adapter
                self._kept.move_to_end(digest)
                if len(self._kept) > self._config.max_num_mem_cached_lora:
                    self._kept.popitem(last=False)
            return adapter

    # ---- from the host's memory to the devices

    def take(self, adapter: HostAdapter) -> Slot | None:
        """A slot with this adapter, for one more request; None: others use all of them."""
        digest = adapter.digest
        slot = next((one for one in self._slots if one.adapter and one.adapter.digest == digest), None)
        if slot is None:
            unused = [one for one in self._slots if not one.num_users]
            if not unused:
                return None
            slot = min(unused, key=lambda one: one.used)
            slot.adapter, slot.staged = adapter, self._copier.submit(self._stage, adapter)
        slot.num_users += 1
        slot.used = time.monotonic()
        return slot

    def _stage(self, adapter: HostAdapter) -> list[Slots]:
        return [one.stage(adapter) for one in self._runners]

    def place_again(self, runner: StepRunner) -> None:
        """All that is in slots: its devices have lost it."""
        for slot in self._slots:
            if slot.adapter is not None and slot.staged is None:
                runner.write_adapter(slot.number, slot.adapter, runner.stage(slot.adapter))

    def is_placed(self, slot: Slot) -> bool:
        """Whether steps can use it; raises what went wrong, and the slot is empty then."""
        if slot.staged is None:
            if slot.adapter is None:
                raise ModelError("the adapter could not be copied to the devices")
            return True
        if not slot.staged.done():
            return False
        staged, slot.staged = slot.staged, None
        try:
            assert slot.adapter is not None
            for runner, one in zip(self._runners, staged.result(), strict=True):
                runner.write_adapter(slot.number, slot.adapter, one)
        except Exception:
            slot.adapter = None
            raise
        return True

    def release(self, slot: Slot) -> None:
        """One request less. A step in flight that uses it comes before whatever is written next."""
        slot.num_users -= 1
        assert slot.num_users >= 0, "a slot was released too often"

    def check(self, num_users: int) -> None:
        """So many requests hold slots, and no adapter is in two."""
        assert sum(slot.num_users for slot in self._slots) == num_users, "a slot is lost or held too often"
        digests = [slot.adapter.digest for slot in self._slots if slot.adapter]
        assert len(set(digests)) == len(digests)
