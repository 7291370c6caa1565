"""A modelled device and its swap tier: bytes, and a clock with three streams (compute, copies out, copies in).

The machine moves these storages as it moves real ones, so what a step is predicted to do is what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..ground.errors import TierError
from ..ir import Link
from ..machine.account import LiveBytes, MakeRoom
from .streams import Streams


@dataclass
class ModelledCounters:
    """See `store.Counters`."""

    host_stall_ms: float = 0.0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    spared_bytes: int = 0
    late_swaps: int = 0
    kept_after_errors: int = 0
    recomputed_ops: int = 0


class ModelledClock:
    """The time of a step as its compute sees it.

    Args:
        link: What copies take, and what they take of compute.
        copy_begin_ms: Time in ms of compute that beginning a copy takes.

    Attributes:
        now_ms: Since the step began.
        stall_ms: Part of it in which compute has waited for copies.
    """

    def __init__(self, link: Link, copy_begin_ms: float = 0.0) -> None:
        self._streams, self._copy_begin_ms = Streams(link), copy_begin_ms
        self.now_ms = self.stall_ms = 0.0

    def compute(self, work_ms: float) -> None:
        """Let compute work for so many ms, and for longer while copies run."""
        self.now_ms = self._streams.compute(self.now_ms, work_ms)

    def wait_until(self, end_ms: float) -> float:
        """Let compute wait until a time, and return for how many ms it did."""
        waited_ms = max(0.0, end_ms - self.now_ms)
        self.now_ms = max(self.now_ms, end_ms)
        self.stall_ms += waited_ms
        return waited_ms

    def copy_out(self, size_bytes: int) -> tuple[float, float]:
        """Begin a copy to the tier, and return when it starts and ends."""
        self.compute(self._copy_begin_ms)
        return self._streams.copy_out(self.now_ms, size_bytes)

    def copy_in(self, size_bytes: int) -> tuple[float, float]:
        """Begin a copy from the tier, and return when it starts and ends."""
        self.compute(self._copy_begin_ms)
        return self._streams.copy_in(self.now_ms, size_bytes)


class ModelledStorage:
    """Memory of the device. It is free again when nothing refers to it.

    Args:
        memory: The memory, which counts it.
        size_bytes: Its size.
        taken_bytes: What the allocator takes for it. None: its size.

    Attributes:
        held_by_program: How many references the program has.
    """

    def __init__(self, memory: ModelledMemory, size_bytes: int, taken_bytes: int | None = None) -> None:
        self.held_by_program = 0
        self._memory, self._size_bytes = memory, size_bytes
        self._taken_bytes = size_bytes if taken_bytes is None else taken_bytes
        memory.take(self._taken_bytes)

    def __del__(self) -> None:
        self._memory.take(-self._taken_bytes)

    def nbytes(self) -> int:
        """Size in bytes."""
        return self._size_bytes

    def data_ptr(self) -> int:
        """A number that no other living storage has."""
        return id(self)


class ModelledMemory(LiveBytes):
    """The memory of the device, and the account of it: see `store.Memory` and `account.LiveBytes`.

    Args:
        taken_bytes: What the allocator takes for a storage, by its size in bytes. What is not in it takes its size.

    Attributes:
        asks: Allocations ask for room.
        live_bytes: Of all storages, and of what is live beside them.
        peak_bytes: The highest live bytes since `reset_peak`.
        budget_bytes: What is asked for room before it is passed. None: nothing is.
    """

    asks = True

    def __init__(self, taken_bytes: Mapping[int, int] | None = None) -> None:
        self._taken_bytes = taken_bytes or {}
        self._beside_bytes = 0
        self.live_bytes = self.peak_bytes = 0
        self.budget_bytes: int | None = None
        self._make_room: MakeRoom = lambda _: None

    def new(self, size_bytes: int) -> ModelledStorage:
        """Allocate, after room was made."""
        taken_bytes = self._taken_bytes.get(size_bytes, size_bytes)
        self.ask_for(taken_bytes)
        return ModelledStorage(self, size_bytes, taken_bytes)

    def set_beside(self, beside_bytes: int) -> None:
        """Set what is live beside all storages, after room was made for what is more."""
        self.ask_for(max(0, beside_bytes - self._beside_bytes))
        self.take(beside_bytes - self._beside_bytes)
        self._beside_bytes = beside_bytes

    def ask_for(self, more_bytes: int) -> None:
        """Ask for room, where so many more bytes would pass the budget."""
        if self.budget_bytes is not None and self.live_bytes + more_bytes > self.budget_bytes:
            self._make_room(self.live_bytes + more_bytes - self.budget_bytes)

    def rise(self, more_bytes: int) -> None:
        """Have so many more bytes live for a moment, after room was made."""
        self.ask_for(more_bytes)
        self.take(more_bytes)
        self.take(-more_bytes)

    def take(self, more_bytes: int) -> None:
        """Count bytes that have come, or gone if they are below zero."""
        self.live_bytes += more_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def is_held_elsewhere(self, storage: ModelledStorage) -> bool:
        """Whether the program holds a storage."""
        return storage.held_by_program > 0

    def look(self) -> tuple[int, int] | None:
        """Return None, since allocations ask for room by themselves."""
        return None

    def now(self) -> int:
        """Live bytes."""
        return self.live_bytes

    def peak(self) -> int:
        """Highest live bytes since `reset_peak`."""
        return self.peak_bytes

    def reset_peak(self) -> None:
        """Begin to look for the highest live bytes from now on."""
        self.peak_bytes = self.live_bytes

    def hold(self, budget_bytes: int, make_room: MakeRoom) -> None:
        """Ask for room before live bytes pass the budget."""
        self.budget_bytes, self._make_room = budget_bytes, make_room

    def let_go(self) -> None:
        """Have no room asked for from now on."""
        self.budget_bytes = None


class ModelledTicket:
    """A copy that ends at a known time.

    Args:
        clock: Of the step.
        start_ms: When it starts.
        end_ms: When it ends.
        moved_bytes: What it moves. Also an attribute.

    Attributes:
        copy_ms: What it takes.
    """

    error: BaseException | None = None

    def __init__(self, clock: ModelledClock, start_ms: float, end_ms: float, moved_bytes: int) -> None:
        self._clock, self._end_ms, self.moved_bytes = clock, end_ms, moved_bytes
        self.copy_ms = end_ms - start_ms

    def is_done(self) -> bool:
        """Whether it has ended by now."""
        return self._end_ms <= self._clock.now_ms

    def wait(self) -> float:
        """Let compute wait for it, and return for how many ms it did."""
        return self._clock.wait_until(self._end_ms)


class ModelledPlace:
    """Room in the tier for one value."""

    def __init__(self, tier: ModelledTier, size_bytes: int) -> None:
        self.tier, self.size_bytes = tier, size_bytes

    def copy_out(self, storage: ModelledStorage) -> ModelledTicket:
        """Begin to copy a storage here."""
        self.tier.copies_out += 1
        return ModelledTicket(self.tier.clock, *self.tier.clock.copy_out(self.size_bytes), self.size_bytes)

    def copy_in(self, storage: ModelledStorage) -> ModelledTicket:
        """Begin to fill a storage from here."""
        self.tier.copies_in += 1
        return ModelledTicket(self.tier.clock, *self.tier.clock.copy_in(self.size_bytes), self.size_bytes)

    def copied(self, error: BaseException | None) -> None:
        """Note how a copy out to here ended."""
        if error is not None:
            self.tier.failed(error)

    def release(self) -> None:
        """Give the room back."""
        self.tier.in_use -= 1
        self.tier.in_use_bytes -= self.size_bytes


class ModelledTier:
    """The swap tier, and what is wrong with it: see `store.Health`.

    Args:
        clock: Of the step.
        most_bytes: Its size. None: there is always room.

    Attributes:
        in_use: Number of rooms that are taken.
        in_use_bytes: Their size.
        copies_out: Number of copies out so far.
        copies_in: Number of copies in so far.
    """

    def __init__(self, clock: ModelledClock, most_bytes: int | None = None) -> None:
        self.clock, self._most_bytes = clock, most_bytes
        self.in_use = self.in_use_bytes = self.copies_out = self.copies_in = 0
        self.fault: TierError | None = None

    def take(self, size_bytes: int) -> ModelledPlace | None:
        """Return room for a value, or None if there is none left."""
        if self._most_bytes is not None and self.in_use_bytes + size_bytes > self._most_bytes:
            return None
        self.in_use += 1
        self.in_use_bytes += size_bytes
        return ModelledPlace(self, size_bytes)

    def failed(self, error: BaseException, *, is_told: bool = True) -> TierError:
        """Note a fault, and return it."""
        self.fault = TierError(str(error))
        return self.fault
