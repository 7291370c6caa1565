"""The moves of values between a device and its swap tier. Plan and pressure decide; both move values here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..ground.errors import TierError
from .growing import GrowingBudget
from .speed import CopySpeed
from .values import Memory, Place, Storage, Value


class Health(Protocol):
    """What is wrong with the tier.

    Attributes:
        fault: The latest fault since the step began, or None.
    """

    fault: TierError | None

    def failed(self, error: BaseException, *, is_told: bool = True) -> TierError:
        """Note a fault, and return what is wrong."""


class Counters(Protocol):
    """Counters of one step: see `executor.statistics.RunStats`."""

    host_stall_ms: float
    swapped_out_bytes: int
    swapped_in_bytes: int
    spared_bytes: int
    late_swaps: int
    kept_after_errors: int


class Store:
    """Copies values out and back. The caller holds the lock of the step.

    Args:
        memory: The device's memory.
        health: Notes what is wrong with the tier.
        speed: Learns from copies that have ended.

    Attributes:
        on_move: Called with "left", a value and its storage before its bytes are dropped, with "returned", a value and
            its new storage after memory was allocated for them, and with "ended", a value and None if it is read no
            more while it is not there. None: nobody wants to know.
        growing: Has to know of moves, as the budget grows with the step, or None.
    """

    def __init__(self, memory: Memory, health: Health, speed: CopySpeed) -> None:
        self.memory, self._health, self.speed = memory, health, speed
        self.on_move: Callable[[str, Value, Storage | None], None] | None = None
        self.growing: GrowingBudget | None = None

    def start_out(self, value: Value, place: Place, stats: Counters) -> None:
        """Start to copy a value out: here -> leaving."""
        storage = value.storage
        assert storage is not None
        assert value.ticket is None
        assert not value.is_copied
        value.place, value.size_bytes = place, storage.nbytes()
        value.ticket = place.copy_out(storage)
        stats.swapped_out_bytes += value.size_bytes

    def finish_out(self, value: Value, stats: Counters) -> float:
        """Wait for a copy out, and return for how many ms: leaving -> clean, or here if the copy failed."""
        ticket = value.ticket
        if ticket is None or value.is_copied:
            return 0.0
        place = value.place
        waited_ms = ticket.wait()
        self.speed.learn(ticket, value.size_bytes, outwards=True)
        if place is not None:  # else an interrupt came before the end of this
            place.copied(ticket.error)
        if ticket.error is None:
            value.is_copied = True
            stats.spared_bytes += value.size_bytes - ticket.moved_bytes
        else:
            stats.kept_after_errors += 1
            self.forget_copy(value)
        value.ticket = None
        return waited_ms

    def drop(self, value: Value) -> int:
        """Drop a value's bytes, and return how many are free then: clean -> away, here -> unmade, returning -> away."""
        storage = value.storage
        assert storage is not None
        assert value.is_copied or value.ticket is None
        if value.ticket is not None:
            value.ticket.wait()
            value.ticket = None
        if self.on_move is not None:
            self.on_move("left", value, storage)
        value.storage = storage = None
        is_gone = value.storage is None  # else an op has begun to work on it
        if is_gone and self.growing is not None:
            self.growing.left(value)
        return value.size_bytes if is_gone else 0

    def start_in(self, value: Value, stats: Counters) -> None:
        """Start to bring a value back: away -> returning."""
        assert value.storage is None
        assert value.place is not None
        if self.growing is not None:
            self.growing.comes(value)
        storage = self.memory.new(value.size_bytes)
        if self.on_move is not None:
            self.on_move("returned", value, storage)
        ticket = value.place.copy_in(storage)
        # No interrupt comes between the two: the value would be read too early.
        value.storage, value.ticket = storage, ticket
        stats.swapped_in_bytes += value.size_bytes

    def finish_in(self, value: Value, stats: Counters) -> None:
        """Wait until a value is back: returning -> clean, or away if the copy failed.

        Raises:
            TierError: If it cannot be read back.
        """
        ticket = value.ticket
        if ticket is None or not value.is_copied:
            return
        stats.host_stall_ms += ticket.wait()
        self.speed.learn(ticket, value.size_bytes, outwards=False)
        if ticket.error is None:
            stats.spared_bytes += value.size_bytes - ticket.moved_bytes
        else:
            value.storage = None  # what it holds is not the value
        value.ticket = None
        value.arrived()
        if ticket.error is not None:
            fault = self._health.failed(ticket.error, is_told=False)
            text = f"a swapped activation cannot be read back: {fault}; repeat the step"
            raise TierError(text, fault.kind) from ticket.error

    def settle(self, value: Value) -> None:
        """Wait for whatever copies a value, without a look at how it ended."""
        if value.ticket is not None:
            value.ticket.wait()
            value.ticket = None

    def forget_copy(self, value: Value) -> None:
        """Give a value's room in the tier back: clean -> here."""
        place, value.place, value.is_copied = value.place, None, False
        if place is not None:
            place.release()
