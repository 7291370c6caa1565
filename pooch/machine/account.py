"""The account of bytes: what is live on a device, and who is asked for room before that passes a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

MakeRoom = Callable[[int], None]


class LiveBytes(Protocol):
    """The live bytes of one device. What has a body here is for where no allocation asks, and all is counted anew.

    Attributes:
        asks: Whether allocations ask for room by themselves. Otherwise room has to be made beforehand.
    """

    asks: bool

    def give_up(self) -> None:
        """Ask for no room until `resume`, as nothing can leave: a plain step allocates thousands of times."""
        return

    def resume(self) -> None:
        """Ask for room again. It is called often."""
        return

    def missed_bytes(self) -> int:
        """The most by which the budget was passed since `reset_peak` while room was given up."""
        return 0

    def look(self) -> tuple[int, int] | None:
        """Live bytes now, and by how much they were higher since the last look. None if looking costs too much now."""

    def now(self) -> int:
        """Live bytes."""

    def recent(self) -> int:
        """Live bytes at the last time that they were counted: `now`, unless counting takes long. Asked at each op."""
        return self.now()

    def peak(self) -> int:
        """Highest live bytes since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin to look for the highest live bytes from now on."""

    def recount(self, *, if_less: bool = False) -> None:
        """Count again what no allocation has told of.

        Args:
            if_less: Only if some of what was counted is gone, which is quickly seen.
        """
        return

    def count_given(self, tensors: Iterable[Any]) -> None:
        """Count what a step is given and no allocation has told of, such as a batch in shared memory, until it is gone.

        Args:
            tensors: What it is given.
        """
        return

    def uncounted(self, address: int, size_bytes: int) -> Callable[[int], None] | None:
        """Return what is to be called with the size of some bytes when they end, or None if that is noticed.

        Args:
            address: Where they are.
            size_bytes: How many. They count from now on, if nothing has told of them.
        """
        return None

    def hold(self, budget_bytes: int, make_room: MakeRoom) -> None:
        """Ask for room before live bytes pass the budget, in threads that `ask`."""
        return

    def ask(self, asks: bool) -> None:
        """Set whether the calling thread asks for room."""
        return

    def let_go(self) -> None:
        """Have no room asked for from now on; counting goes on."""
        return

    def raise_failure(self) -> None:
        """Raise what went wrong while an allocation asked for room, in the middle of an op that could not raise it."""
        return

    def blind_ms(self) -> float | None:
        """The longest time in ms between two counts, measured now. None if no byte comes and goes uncounted."""
        return None

    def close(self) -> None:
        """Stop counting."""
        return
