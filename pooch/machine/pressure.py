"""Pressure: the floor beneath every plan. Before live bytes would pass the budget, saved values leave.

Which value leaves, and whether it is copied out or dropped to be made again, is decided by cost: see `eviction.py`.
While there is still room, values are copied out ahead of need, and brought back ahead of reads.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Protocol

from ..ground.weakly import weakly
from .account import LiveBytes
from .away import Away
from .candidates import Candidates, ranked
from .eviction import OURS, EvictionPolicy, distance, ours
from .growing import GrowingBudget
from .leaving_costs import LeavingCosts
from .lock import StepLock
from .own_time import OwnTime
from .persistent import PersistentValues
from .recipes import NEVER_MS
from .speed import CopySpeed
from .store import Counters, Health, Store
from .values import Memory, Storage, Value

_WRITE_AHEAD_SHARE = 0.95  # of what the step may use: from there on, what leaves next is copied beforehand
_WRITTEN_AHEAD, _READ_AHEAD = 2, 3  # copies at a time
_NEXT_TO_LEAVE = 16  # values among which those are that are copied beforehand
_LOOKS_AGAIN, _LOOKS_LATEST = 8, 64  # saves after a look that has found too little to copy; twice as many each time
REACH = 64  # saves before the one that was read: what is read later than that may have to leave again
_EVERYTHING_BYTES = 2**62
_SPARE_SHARE = 0.02  # of what the step may use: freed at once, since looking for candidates takes time
_SMALL_SHARE = _SPARE_SHARE / 32  # of it: copying so little takes about as long as copying nothing
_MOST_RESORTS = 3  # that are asked for at once: what is held back may leave before anything is looked for


class Keeper(Protocol):
    """A step, what it keeps of which is at no cost here as long as nothing has to leave."""

    def let_kept_leave(self, least_bytes: int = 0) -> bool:
        """Register what is held on the device, so that it can leave, and return whether what is smaller stays."""


class Pressure:
    """Keeps live bytes within a budget as long as there is anything that can leave.

    Args:
        budget_bytes: The budget.
        live: Counts live bytes.
        memory: The device's memory.
        health: What is wrong with the tier.
        speed: How fast copies are.
        stats: Counters of the current step. Also an attribute.
        policy: By what rule values leave. Also an attribute.

    Attributes:
        lock: Guards all values. An allocation asks for room in the middle of an op, in any thread.
        store: Moves values.
        stayed_bytes: The most that had to stay then because the tier did not take it.
        stall_ms: Time that making room has taken in the current step.
        own_time: What all of Pooch's work within the step takes, waiting for copies included.
        saves: Position of the last save so far.
        persistent: The values that outlive steps and may leave too, or None.
        last_resort: Asked where nothing more can leave; returns how many bytes it has freed, or None if it has nothing.
    """

    def __init__(
        self,
        budget_bytes: int,
        live: LiveBytes,
        memory: Memory,
        health: Health,
        speed: CopySpeed,
        stats: Counters,
        policy: EvictionPolicy = OURS,
    ) -> None:
        self.budget_bytes, self.policy = budget_bytes, policy
        self.live, self.memory, self._health, self.speed, self.stats = live, memory, health, speed, stats
        self.store = Store(memory, health, speed)
        self._costs = LeavingCosts(policy, speed, self.store)
        self.lock = StepLock(self._handle_ended)
        self._missing_bytes = self.stayed_bytes = 0
        self.stall_ms, self.own_time = 0.0, OwnTime()
        self._values: dict[Value, None] = {}  # in the order in which they were saved
        self.saves = 0
        self._position = 0  # of the backward pass: it reads what was saved before this
        self._candidates = Candidates(self._values, self._can_leave, self._costs.cheapest_ms)
        self._away = Away()
        self._writing: dict[Value, None] = {}  # ahead of need
        self._reading: dict[Value, None] = {}
        self._look_at, self._looks_again = 0, _LOOKS_AGAIN  # from which save on `write_ahead` looks, and how many later
        self._start_bytes = self._most_higher_bytes = self._last_look_bytes = 0  # the last: after a look in the step
        self._keeping: weakref.WeakSet[Keeper] = weakref.WeakSet()
        self.persistent: PersistentValues | None = None
        self.last_resort: Callable[[], int | None] = type(None)  # finds nothing

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin(self, stats: Counters) -> None:
        """Begin to count for a new step."""
        with self.lock:  # an interrupt may have kept a handle from telling its end
            for value in [each for each in self._values if each.owner() is None]:
                self._let_go(value)
        self.stats, self._missing_bytes, self.stayed_bytes, self.stall_ms = stats, 0, 0, 0.0
        self.live.resume()
        self._start_bytes = self.live.now() - (0 if self.persistent is None else self.persistent.here_bytes())
        self._last_look_bytes = 0
        self.live.reset_peak()

    def grow_with(self, growing: GrowingBudget | None) -> None:
        """Hold a budget that grows with the step. None ends that."""
        self.store.growing = growing
        if growing is not None:
            self.set_budget(growing.size_bytes())

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget."""
        self.budget_bytes = budget_bytes
        self.live.hold(budget_bytes, weakly(self.make_room))

    @property
    def missing_bytes(self) -> int:
        """The most by which live bytes had to pass the budget in the current step, as nothing more could leave."""
        return max(self._missing_bytes, self.live.missed_bytes())

    # What can leave ---------------------------------------------------------------------------------------------------

    def save(self, value: Value, saved_at: int | None = None) -> None:
        """Register a value that autograd saves now, or has saved at a position."""
        value.saved_at = self.saves + 1 if saved_at is None else saved_at
        if value.saved_at > self.saves:
            self.saves = self._position = value.saved_at
        if value.size_bytes:  # otherwise there is nothing to free
            self._values[value] = None
            self.returned(value)

    @property
    def small_bytes(self) -> int:
        """What is smaller than this is looked at once nothing else is left: for what it frees, moving it costs much."""
        share = 0.0 if self.store.growing is not None else _SMALL_SHARE
        return max(0, int(share * (self.budget_bytes - self._start_bytes)))

    def returned(self, value: Value) -> None:
        """Note that a value is there."""
        if self.store.growing is not None:
            self.store.growing.comes(value)
        if value in self._values:
            self.live.resume()
            self._candidates.add(value)
            owner = value.owner()
            for other in () if owner is None else owner.moved(value):
                self._candidates.add(other)

    def keeps(self, step: Keeper) -> None:
        """Ask a step, before anything leaves, to let what it keeps leave as well."""
        with self.lock:  # another thread may be looking through them
            self._keeping.add(step)
            self.live.resume()

    def make_room(self, missing_bytes: int) -> None:
        """Evict until so many bytes are free, or until nothing more can leave."""
        with self._stalling():
            growing = self.store.growing
            if growing is not None:  # with the lock, so that two threads that ask at once do not lower it again
                needed_bytes = self.budget_bytes + missing_bytes
                self.set_budget(max(self.budget_bytes, growing.size_bytes(needed_bytes)))
                missing_bytes = needed_bytes - self.budget_bytes
                if missing_bytes <= 0:
                    return
            spare_bytes = int(_SPARE_SHARE * (self.budget_bytes - self._start_bytes))
            freed_bytes = self._evict_cheapest(missing_bytes, spare_bytes)
            for _ in range(_MOST_RESORTS):
                may_find = freed_bytes < missing_bytes and growing is None
                if not may_find or (found_bytes := self.last_resort()) is None:
                    break
                freed_bytes += found_bytes + self._evict_cheapest(missing_bytes - freed_bytes - found_bytes)
            if freed_bytes < missing_bytes and self._health.fault is not None:
                here_bytes = sum(value.size_bytes for value in self._values if self._can_leave(value))
                self.stayed_bytes = max(self.stayed_bytes, here_bytes)
            if freed_bytes < missing_bytes:
                self._missing_bytes = max(self._missing_bytes, missing_bytes - freed_bytes)
                may_leave = self._keeping or self.persistent is not None
                if growing is None and not may_leave and all(each.storage is None for each in self._values):
                    self.live.give_up()

    def relieve(self) -> int:
        """Have everything leave that can, as an allocation has failed, and return how many bytes that frees."""
        with self._stalling():
            return self._evict_cheapest(_EVERYTHING_BYTES)

    @contextmanager
    def _stalling(self) -> Iterator[None]:
        """Hold the lock, and count the time that making room takes."""
        start = time.perf_counter()
        with self.own_time, self.lock:
            yield
        elapsed_ms = (time.perf_counter() - start) * 1000
        self.stall_ms += elapsed_ms
        self.stats.host_stall_ms += elapsed_ms

    def look(self, needed_bytes: int) -> None:
        """Make room before an op or a read where allocations do not ask for it.

        Args:
            needed_bytes: What the op is thought to need. The most that ever came between two looks is added to what
                is live if that is more.
        """
        found = None if self.live.asks else self.live.look()
        if found is None:
            return
        now, higher_bytes = found
        rise_bytes = now + higher_bytes - self._last_look_bytes if self._last_look_bytes else 0
        self._most_higher_bytes = max(self._most_higher_bytes, higher_bytes, rise_bytes)
        missing_bytes = now + max(needed_bytes, self._most_higher_bytes) - self.budget_bytes
        if missing_bytes > 0:
            self.make_room(missing_bytes)
            now = self.live.now()
        self._last_look_bytes = now

    def _evict_cheapest(self, missing_bytes: int, spare_bytes: int = 0) -> int:
        """Evict in the order of cost, what plans hold too, and return how many bytes that frees.

        What is to spare is not made up of what is small.
        """
        freed_bytes, least_bytes = 0, self.small_bytes
        self._look_at, self._looks_again = self.saves, _LOOKS_AGAIN  # others leave next
        while True:
            stays = sum(step.let_kept_leave(least_bytes) for step in list(self._keeping)) > 0
            for value in self._next_to_leave():
                if stays and value.outlives_steps:
                    break  # what is small in this step may cost less
                freed_bytes += self._evict(value)
                if freed_bytes >= max(missing_bytes, spare_bytes):
                    return freed_bytes
            if not stays or freed_bytes >= missing_bytes:
                return freed_bytes
            least_bytes = 0

    def _next_to_leave(self) -> Iterator[Value]:
        """Yield values in the order in which they leave."""
        if self.policy.score is ours and self.policy.sample is None:
            saved = self._candidates.cheapest(self._position)
        else:
            saved = ranked(self._values, self._can_leave, self._costs.cheapest_ms, self.policy, self._position)
        return saved if self.persistent is None else self.persistent.among(saved, self._costs.cheapest_ms, self._score)

    def _score(self, value: Value) -> float:
        return ours(value, self._costs.cheapest_ms(value), distance(self._position, value.saved_at))

    def _can_leave(self, value: Value) -> bool:
        if value.storage is None or value.is_busy or value.changed or value.is_pinned:
            return False
        # The copy holds the storage as well: who else does shows when it has ended.
        return value in self._writing or not value.is_held_elsewhere(self.memory)

    def _evict(self, value: Value) -> int:
        """Let a value's bytes leave, and return how many are free now."""
        if value.is_copied:
            return self._drop(value)
        owner = value.owner()
        if owner is not None:
            owner.moved(value)  # what it really costs now
        if value.is_outdated:
            self._finish_out(value)  # and it is copied again
        if value.ticket is None and not value.is_gone:
            gained_ms = self._costs.copy_ms(value) - self._costs.replay_ms(value)
            if gained_ms > 0:
                assert owner is not None, "only its step can replay it"
                owner.gained(gained_ms)
                return self._drop(value)
            self._start_out(value)
        self._finish_out(value)
        if value.is_gone:
            return value.size_bytes  # nothing but the copy has held it
        if not value.is_copied and self._costs.replay_ms(value) == NEVER_MS:
            return 0
        return 0 if value.is_held_elsewhere(self.memory) else self._drop(value)

    def _drop(self, value: Value) -> int:
        owner = value.owner()
        if owner is not None and not value.is_copied:
            owner.remember(value)
        freed_bytes = self.store.drop(value)
        self._away.add(value)
        if owner is not None:
            owner.moved(value)
        return freed_bytes

    def _start_out(self, value: Value) -> bool:
        """Start to copy a value out, and return whether it may be copied and the tier has room for it."""
        if not self.policy.may_copy:
            return False
        owner, place = value.owner(), value.place  # an interrupt may have come when a copy to there was to begin
        if place is None and owner is not None:
            place = owner.take_place(value.size_bytes)
        if place is None:
            return False
        self.store.start_out(value, place, self.stats)
        return True

    # Copies ahead of need ---------------------------------------------------------------------------------------------

    def _finish_out(self, value: Value) -> None:
        self._writing.pop(value, None)
        self.store.finish_out(value, self.stats)
        if value in self._values:  # another thread may have ended it
            self._candidates.add(value)

    @property
    def is_filling(self) -> bool:
        """Whether so much is live that values are copied out ahead of need."""
        return self.live.recent() >= self._start_bytes + _WRITE_AHEAD_SHARE * (self.budget_bytes - self._start_bytes)

    def write_ahead(self) -> None:
        """Between ops: start to copy out what leaves next while there is still room, so that nobody waits for it."""
        for value in list(self._writing):
            ticket = value.ticket
            if ticket is None or ticket.is_done():
                with self.lock:
                    self._finish_out(value)
        if (
            self.saves < self._look_at
            or not self.is_filling
            or len(self._writing) >= _WRITTEN_AHEAD
            or not self.policy.may_copy
        ):
            return
        with self.lock:
            self._look_at = self.saves + self._looks_again
            self._looks_again = min(2 * self._looks_again, _LOOKS_LATEST)
            for value in islice(self._next_to_leave(), _NEXT_TO_LEAVE):
                if len(self._writing) >= _WRITTEN_AHEAD:
                    self._look_at, self._looks_again = self.saves, _LOOKS_AGAIN
                    return
                if value.state == "here" and self._costs.replay_ms(value) >= self._costs.copy_ms(value):
                    if not self._start_out(value):
                        return
                    self._writing[value] = None

    def read_ahead(self, value: Value) -> None:
        """After a read: start to bring back what the backward pass will most likely read next, if there is room."""
        for other in [each for each in self._reading if each.ticket is None or each.ticket.is_done()]:
            del self._reading[other]
        for other in self._away.before(value.saved_at, REACH):
            if len(self._reading) >= _READ_AHEAD:
                return
            if other.owner() is None:
                continue
            next_op_bytes = max(2 * value.size_bytes, 2 * other.size_bytes, self._most_higher_bytes)
            needed_bytes = other.size_bytes + next_op_bytes
            if self.live.recent() + needed_bytes > self.budget_bytes:
                return
            self.store.start_in(other, self.stats)
            self.returned(other)
            self._reading[other] = None

    # Reads ------------------------------------------------------------------------------------------------------------

    def ensure(self, value: Value) -> Storage:
        """Return a value's storage on the device. The caller holds the lock, and reads it before it releases that.

        Raises:
            TierError: If it cannot be read back.
        """
        was_busy, value.is_busy = value.is_busy, True
        try:
            if value.storage is None:
                self.stats.late_swaps += 1
                self._bring_back(value)
            self.store.finish_in(value, self.stats)
            assert value.storage is not None
            return value.storage
        finally:
            value.is_busy = was_busy

    def reading(self, value: Value) -> None:
        """Note that the backward pass has come to this value."""
        self._position = value.saved_at

    def _bring_back(self, value: Value) -> None:
        if value.is_copied:
            self.store.start_in(value, self.stats)
        else:
            owner = value.owner()
            assert owner is not None, "a step lives as long as its handles"
            value.storage = owner.make_again(value.number)
            value.forget_witness()
        self.returned(value)

    # The end ----------------------------------------------------------------------------------------------------------

    def overwritten(self, value: Value) -> None:
        """Prepare for an op that writes over a value's storage: finish its copy, and keep the storage from now on.

        The tensors that autograd saved may be other parts of it, as in a recurrent cell whose gates are changed in
        place one after the other. Their version counters tell when they are read.
        """
        with self.lock:
            self._candidates.discard(value)
            value.changed = True
            if value.storage is None:
                return  # the program no longer holds what left, so it is another storage that is written
            self.store.settle(value)
            self.store.forget_copy(value)

    def _handle_ended(self, value: Value) -> None:
        value.handles -= 1
        if value.handles:
            return
        owner = value.owner()
        if owner is not None and owner.released(value.number):
            self.forget(value)
            return
        if self.store.on_move is not None and value.storage is None:
            self.store.on_move("ended", value, None)
        self._let_go(value)

    def forget(self, value: Value) -> None:
        """Have a value leave no more: its plan decides on it again."""
        self._values.pop(value, None)
        self._writing.pop(value, None)
        self._reading.pop(value, None)
        self._candidates.discard(value)
        self._away.discard(value)
        value.saved_at = 0

    def _let_go(self, value: Value) -> None:
        self.forget(value)
        if self.store.growing is not None:
            self.store.growing.comes(value)
        self.store.settle(value)
        value.storage = None
        self.store.forget_copy(value)
        value.forget_witness()
