"""The verifier's own account of who holds what. It shares nothing with the lowering's account, on purpose."""

from __future__ import annotations

from collections import defaultdict

from ..analysis.dataflow import Dataflow

STEP = "step"  # the program or autograd
SCHEDULE = "schedule"  # held until a drop, because replays read it


class Ledger:
    """Who holds each value that the step makes, and how many bytes that adds to those outside any decision.

    Attributes:
        extra_bytes: on top of `Dataflow.base_points`, which hold every value but the activations.
        intermediates: replayed values that live until their drop and belong to no record.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self._values = dataflow.profile.values
        self._activation_ids = dataflow.activation_ids
        self._holders: dict[int, set[str]] = defaultdict(set)
        self._emptied: dict[int, set[str]] = {}  # who holds what was emptied
        self.extra_bytes = 0
        self.intermediates: set[int] = set()

    def is_resident(self, value: int) -> bool:
        """Whether anybody holds the value."""
        return bool(self._holders[value])

    def holds(self, value: int, holder: str) -> bool:
        """Whether this holder does."""
        return holder in self._holders[value]

    def hold(self, value: int, holder: str) -> None:
        """Add a holder."""
        before = self._counted_bytes(value)
        self._holders[value].add(holder)
        self.extra_bytes += self._counted_bytes(value) - before

    def let_go(self, value: int, holder: str) -> None:
        """Remove a holder, if it was one."""
        before = self._counted_bytes(value)
        self._holders[value].discard(holder)
        self.extra_bytes += self._counted_bytes(value) - before

    def empty(self, value: int) -> None:
        """Free its bytes; its holders keep an empty storage."""
        before = self._counted_bytes(value)
        self._emptied[value] = self._holders.pop(value)
        self.extra_bytes -= before

    def refill(self, value: int) -> None:
        """Give its holders their bytes back."""
        self._holders[value] = self._emptied.pop(value)
        self.extra_bytes += self._counted_bytes(value)

    def is_empty(self, value: int) -> bool:
        """Whether its bytes are gone while somebody holds it."""
        return value in self._emptied

    def emptied(self) -> list[int]:
        """Values that are empty just now, ascending."""
        return sorted(self._emptied)

    def forget(self, value: int) -> None:
        """The empty storage has lost its last holder."""
        self._emptied.pop(value, None)

    def held_by_schedule(self) -> list[int]:
        """Values that the schedule still holds, ascending."""
        return sorted(value for value, holders in self._holders.items() if SCHEDULE in holders)

    def add_intermediate(self, value: int) -> None:
        """A replay made a copy of its own."""
        self.intermediates.add(value)
        self.extra_bytes += self._values[value].allocated_bytes

    def remove_intermediate(self, value: int) -> None:
        """The copy was dropped, or overwritten."""
        self.intermediates.remove(value)
        self.extra_bytes -= self._values[value].allocated_bytes

    def _counted_bytes(self, value: int) -> int:
        holders = self._holders[value]
        in_base = value not in self._activation_ids and STEP in holders
        return self._values[value].allocated_bytes if holders and not in_base else 0
