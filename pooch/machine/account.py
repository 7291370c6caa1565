"""The account of bytes: what is live on a device, and who is asked for room before that passes a budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

MakeRoom = Callable[[int], None]


def weakly(make_room: Any) -> MakeRoom:
    """Return a method that makes room, without keeping its object alive; does nothing once that is gone."""
    method: weakref.WeakMethod[MakeRoom] = weakref.WeakMethod(make_room)

    def ask(missing_bytes: int) -> None:
        alive = method()
        if alive is not None:
            alive(missing_bytes)

    return ask


class LiveBytes(Protocol):
    """The live bytes of one device.

    Attributes:
        asks: Whether allocations ask for room by themselves. Otherwise room has to be made beforehand.
    """

    asks: bool

    def give_up(self) -> None:
        """Ask for no room until `resume`, as nothing can leave: a plain step allocates thousands of times."""

    def resume(self) -> None:
        """Ask for room again. It is called often."""

    def missed_bytes(self) -> int:
        """The most by which the budget was passed since `reset_peak` while room was given up."""

    def look(self) -> tuple[int, int] | None:
        """Live bytes now, and by how much they were higher since the last look. None if looking costs too much now."""

    def now(self) -> int:
        """Live bytes."""

    def recent(self) -> int:
        """Live bytes at the last time that they were counted: `now`, unless counting takes long. Asked at each op."""

    def peak(self) -> int:
        """Highest live bytes since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin to look for the highest live bytes from now on."""

    def recount(self, *, if_less: bool = False) -> None:
        """Count again what no allocation has told of.

        Args:
            if_less: Only if some of what was counted is gone, which is quickly seen.
        """

    def uncounted(self, address: int, size_bytes: int) -> Callable[[int], None] | None:
        """Return what is to be called with the size of some bytes when they end, or None if that is noticed.

        Args:
            address: Where they are.
            size_bytes: How many. They count from now on, if nothing has told of them.
        """

    def hold(self, budget_bytes: int, make_room: MakeRoom) -> None:
        """Ask for room before live bytes pass the budget, in threads that `ask`."""

    def ask(self, asks: bool) -> None:
        """Set whether the calling thread asks for room."""

    def let_go(self) -> None:
        """Have no room asked for from now on; counting goes on."""

    def raise_failure(self) -> None:
        """Raise what went wrong while an allocation asked for room, in the middle of an op that could not raise it."""

    def blind_ms(self) -> float | None:
        """The longest time in ms between two counts, measured now. None if no byte comes and goes uncounted."""

    def close(self) -> None:
        """Stop counting."""


class NobodyAsks:
    """What live bytes do not need where no allocation asks for room, and every figure is counted anew."""

    def give_up(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def missed_bytes(self) -> int:
        """Return 0."""
        return 0

    def recount(self, *, if_less: bool = False) -> None:
        """Do nothing."""

    def uncounted(self, address: int, size_bytes: int) -> None:
        """Return None."""

    def hold(self, budget_bytes: int, make_room: MakeRoom) -> None:
        """Do nothing."""

    def ask(self, asks: bool) -> None:
        """Do nothing."""

    def let_go(self) -> None:
        """Do nothing."""

    def raise_failure(self) -> None:
        """Do nothing: room is made between ops, where errors are raised at once."""

    def blind_ms(self) -> float | None:
        """Return None."""
        return None

    def close(self) -> None:
        """Do nothing."""
