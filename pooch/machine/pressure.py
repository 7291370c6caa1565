"""Pressure: the floor beneath every plan. Before live bytes would pass the budget, saved values leave.

Which value leaves, and whether it is copied out or dropped to be made again, is decided by cost: see `eviction.py`.
While there is still room, values are copied out ahead of need, and brought back ahead of reads.
"""

from __future__ import annotations

import heapq
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Protocol

from .account import LiveBytes
from .eviction import OURS, EvictionPolicy, distance
from .lock import StepLock
from .recipes import NEVER_MS
from .speed import CopySpeed
from .store import Counters, Health, Memory, Store
from .values import Storage, Value

_WRITE_AHEAD_SHARE = 0.5  # of what the step may use: from there on, the copy lane is kept busy
_COPIES_AHEAD = 2
_LOOKED_AT = 8  # values per op, so that the time to look does not grow with the step
_EVERYTHING_BYTES = 2**62
_SPARE_SHARE = 0.02  # of what the step may use: freed at once, since looking for candidates takes time


class Keeper(Protocol):
    """A planned step, whose values are at no cost here as long as nothing has to leave."""

    def let_kept_leave(self) -> None:
        """Register what the plan holds on the device, so that it can leave."""


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
        missing_bytes: The most by which live bytes had to pass the budget in the current step, as nothing more could
            leave.
        stayed_bytes: The most that had to stay then because the tier did not take it.
        stall_ms: Time that making room has taken in the current step.
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
        self.lock = StepLock(self._handle_ended)
        self.missing_bytes = self.stayed_bytes = 0
        self.stall_ms = 0.0
        self._values: dict[Value, None] = {}  # in the order in which they were saved
        self._saves = 0
        self._position = 0.0  # of the backward pass: it reads what was saved before this
        self._ahead: deque[Value] = deque()
        # What may be copied out ahead of need, the oldest first. A dict would look through its holes each time.
        self._unwritten: OrderedDict[Value, None] = OrderedDict()
        self._start_bytes = 0
        self._largest_bytes = 0
        self._most_higher_bytes = 0
        self._last_look_bytes = 0  # live bytes after the last look of the step
        self._share: float | None = None
        self._keeping: weakref.WeakSet[Keeper] = weakref.WeakSet()

    # Steps ------------------------------------------------------------------------------------------------------------

    def begin(self, stats: Counters) -> None:
        """Begin to count for a new step."""
        with self.lock:  # an interrupt may have kept a handle from telling its end
            for value in [each for each in self._values if each.owner() is None]:
                self._let_go(value)
        self.stats, self.missing_bytes, self.stayed_bytes, self.stall_ms = stats, 0, 0, 0.0
        self._start_bytes = self.live.now()
        self._last_look_bytes = 0
        self.live.reset_peak()

    def grow_with(self, share: float | None) -> None:
        """Hold a share of the in-core peak, as far as it is known: it grows with the step. None ends that.

        What would be live in-core never shrinks below its highest value so far, so neither does the budget, and at the
        end of the step it is the share of the step's in-core peak.
        """
        self._share = share
        if share is not None:
            self.set_budget(int(share * self.live.now()))

    def _grow(self, missing_bytes: int) -> int:
        """Raise the budget to the share of what would be live in-core now, and return what is still missing.

        The caller holds the lock, so that two threads that ask at once do not lower it again.
        """
        assert self._share is not None
        away_bytes = sum(value.size_bytes for value in self._values if value.storage is None)
        grown_bytes = int(self._share * (self.budget_bytes + missing_bytes + away_bytes))
        if grown_bytes > self.budget_bytes:
            missing_bytes -= grown_bytes - self.budget_bytes
            self.set_budget(grown_bytes)
        return missing_bytes

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget."""
        self.budget_bytes = budget_bytes
        me = weakref.ref(self)

        def ask(missing_bytes: int) -> None:
            pressure = me()
            if pressure is not None:
                pressure.make_room(missing_bytes)

        self.live.hold(budget_bytes, ask)

    # What can leave ---------------------------------------------------------------------------------------------------

    def saved(self, value: Value) -> None:
        """Register a value that autograd has saved."""
        if value.size_bytes == 0:
            return  # there is nothing to free
        self._values[value] = None
        self._unwritten[value] = None
        self._largest_bytes = max(self._largest_bytes, value.size_bytes)

    def save(self, value: Value) -> None:
        """Register a value that autograd saves now."""
        value.saved_at = self.next_save()
        self.saved(value)

    def next_save(self) -> int:
        """Return the position of the next save."""
        self._saves += 1
        self._position = self._saves
        return self._saves

    def keeps(self, step: Keeper) -> None:
        """Ask a planned step, before anything leaves, to let what its plan holds leave as well."""
        with self.lock:  # another thread may be looking through them
            self._keeping.add(step)

    def make_room(self, missing_bytes: int) -> None:
        """Evict until so many bytes are free, or until nothing more can leave."""
        start = time.perf_counter()
        with self.lock:
            if self._share is not None:
                missing_bytes = self._grow(missing_bytes)
                if missing_bytes <= 0:
                    return
            for step in list(self._keeping):
                step.let_kept_leave()
            freed_bytes = self._finish_copies_ahead()
            if freed_bytes < missing_bytes:
                spare_bytes = int(_SPARE_SHARE * (self.budget_bytes - self._start_bytes))
                freed_bytes += self._evict_cheapest(max(missing_bytes - freed_bytes, spare_bytes))
            if freed_bytes < missing_bytes and self._health.fault is not None:
                here_bytes = sum(value.size_bytes for value in self._candidates())
                self.stayed_bytes = max(self.stayed_bytes, here_bytes)
        if freed_bytes < missing_bytes:
            self.missing_bytes = max(self.missing_bytes, missing_bytes - freed_bytes)
        elapsed_ms = (time.perf_counter() - start) * 1000
        self.stall_ms += elapsed_ms
        self.stats.host_stall_ms += elapsed_ms

    def relieve(self) -> int:
        """Have everything leave that can, as an allocation has failed, and return how many bytes that frees."""
        start = time.perf_counter()
        with self.lock:
            for step in list(self._keeping):
                step.let_kept_leave()
            freed_bytes = self._finish_copies_ahead() + self._evict_cheapest(_EVERYTHING_BYTES)
        elapsed_ms = (time.perf_counter() - start) * 1000
        self.stall_ms += elapsed_ms
        self.stats.host_stall_ms += elapsed_ms
        return freed_bytes

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

    def _evict_cheapest(self, missing_bytes: int) -> int:
        """Evict in the order of cost. A cost that has grown since it was computed is computed again."""
        heap = self._ranked()
        freed_bytes = 0
        while heap and freed_bytes < missing_bytes:
            cost, place, value = heapq.heappop(heap)
            now = self._cost(value)
            if heap and now > heap[0][0] and now > cost:
                heapq.heappush(heap, (now, place, value))
                continue
            evicted_bytes = self._evict(value)
            freed_bytes += evicted_bytes
            if evicted_bytes and self.policy.sample is not None:
                heap = self._ranked()  # others may be looked at now
        return freed_bytes

    def _ranked(self) -> list[tuple[float, int, Value]]:
        """Return a heap of those that are looked at, each with its score and its place in the order of saving."""
        looked_at = list(self._candidates())
        if self.policy.sample is not None:
            can_leave = [each for each in looked_at if min(self._copy_ms(each), self._replay_ms(each)) < NEVER_MS]
            looked_at = self.policy.sample(can_leave) if can_leave else []
        heap = [(self._cost(value), place, value) for place, value in enumerate(looked_at)]
        heapq.heapify(heap)
        return heap

    def _candidates(self) -> Iterator[Value]:
        for value in self._values:
            stays = value.storage is None or value.is_busy or value.changed or value.is_pinned
            if not (stays or self.is_held_elsewhere(value)):
                yield value

    def is_held_elsewhere(self, value: Value) -> bool:
        """Whether anything but the value holds its storage, so that dropping it would free nothing.

        Only the thread that runs its step may let go of a storage: PyTorch ends the process if one thread takes or
        releases the Python object of a storage while another one releases the storage in C++.
        """
        storage, owner = value.storage, value.owner()
        if storage is None or value.is_shared or (owner is not None and owner.thread != threading.get_ident()):
            return True
        return self.memory.is_held_elsewhere(storage)

    def _cost(self, value: Value) -> float:
        """Return the score by which values leave, the lowest first."""
        cost_ms = min(self._copy_ms(value), self._replay_ms(value))
        return self.policy.score(value, cost_ms, distance(self._position, value.saved_at))

    def _copy_ms(self, value: Value) -> float:
        if not self.policy.may_copy:
            return NEVER_MS
        back_ms = self.speed.copy_ms(value.size_bytes)
        return back_ms if value.is_copied else 2 * back_ms

    def _replay_ms(self, value: Value) -> float:
        owner = value.owner()
        return NEVER_MS if owner is None or not self.policy.may_drop else owner.replay_ms(value.number)

    def _evict(self, value: Value) -> int:
        """Let a value's bytes leave, and return how many are free now."""
        if value.is_copied:
            return self._drop(value)
        if value.ticket is None:
            gained_ms = self._copy_ms(value) - self._replay_ms(value)
            if gained_ms > 0:
                owner = value.owner()
                assert owner is not None, "only its step can replay it"
                owner.gained(gained_ms)
                return self._drop(value)
            self._start_out(value)
        self.store.finish_out(value, self.stats)
        if not value.is_copied and self._replay_ms(value) == NEVER_MS:
            return 0
        return self._drop(value)

    def _drop(self, value: Value) -> int:
        owner = value.owner()
        if owner is not None and not value.is_copied:
            owner.remember(value)
        freed_bytes = self.store.drop(value)
        if owner is not None:
            owner.forget_costs()
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

    def _finish_copies_ahead(self) -> int:
        """Drop what was copied out ahead of need, and return how many bytes that frees."""
        freed_bytes = 0
        while self._ahead:
            value = self._ahead.popleft()
            if value.state != "leaving":
                continue
            self.store.finish_out(value, self.stats)
            if value.is_copied and not (value.is_busy or self.is_held_elsewhere(value)):
                freed_bytes += self._drop(value)
        return freed_bytes

    def write_ahead(self) -> None:
        """Between ops: start to copy out what is needed last while there is still room, so that nobody waits for it."""
        room_bytes = self.budget_bytes - self._start_bytes
        if self._ahead:
            with self.lock:
                while self._ahead and (self._ahead[0].ticket is None or self._ahead[0].ticket.is_done()):
                    self.store.finish_out(self._ahead.popleft(), self.stats)
        half_full_bytes = self._start_bytes + _WRITE_AHEAD_SHARE * room_bytes
        if self.live.recent() < half_full_bytes or len(self._ahead) >= _COPIES_AHEAD:
            return
        with self.lock:
            for _ in range(min(_LOOKED_AT, len(self._unwritten))):
                if len(self._ahead) >= _COPIES_AHEAD:
                    return
                value, _ = self._unwritten.popitem(last=False)  # the oldest is read last
                if value.state != "here" or value.changed:
                    continue
                if value.is_busy or self.is_held_elsewhere(value):
                    self._unwritten[value] = None
                elif self._replay_ms(value) >= self._copy_ms(value):
                    if not self._start_out(value):
                        return
                    self._ahead.append(value)

    def read_ahead(self, value: Value) -> None:
        """After a read: start to bring back what the backward pass will most likely read next, if there is room."""
        spare_bytes = self.budget_bytes - self.live.recent() - 2 * self._largest_bytes  # what the next op may need
        if spare_bytes <= 0:
            return
        for other in reversed(self._values):
            if other.saved_at >= value.saved_at or other.storage is not None or other.owner() is None:
                continue
            if other.size_bytes <= spare_bytes and other.is_copied:
                self.store.start_in(other, self.stats)
            return

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
            return
        owner = value.owner()
        assert owner is not None, "a step lives as long as its handles"
        value.storage = owner.make_again(value.number)
        value.forget_witness()
        owner.forget_costs()

    # The end ----------------------------------------------------------------------------------------------------------

    def overwritten(self, value: Value) -> None:
        """Prepare for an op that writes over a value's storage: finish its copy, and keep the storage from now on.

        The tensors that autograd saved may be other parts of it, as in a recurrent cell whose gates are changed in
        place one after the other. Their version counters tell when they are read.
        """
        with self.lock:
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
            self.store.on_move("ended", value, 0)
        self._let_go(value)

    def forget(self, value: Value) -> None:
        """Have a value leave no more: its plan decides on it again."""
        self._values.pop(value, None)
        self._unwritten.pop(value, None)
        value.saved_at = 0

    def _let_go(self, value: Value) -> None:
        self.forget(value)
        self.store.settle(value)
        value.storage = None
        self.store.forget_copy(value)
        value.forget_witness()
