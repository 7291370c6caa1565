"""The verifier's own account of who holds what. It deliberately shares no code with the lowering."""

from __future__ import annotations

from collections import defaultdict

from ..analysis.dataflow import Dataflow

STEP = "step"  # held by the program or autograd
SCHEDULE = "schedule"  # held until a drop, because replays read it


class Ledger:
    """Records who holds each value that the step makes, and counts the bytes that this adds.

    Attributes:
        extra_bytes: in addition to `Dataflow.base_points`, which count every value except the activations.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self._values = dataflow.profile.values
        self._activation_ids = dataflow.activation_ids
        self._holders: dict[int, set[str]] = defaultdict(set)
        self._emptied: dict[int, set[str]] = {}  # the holders of emptied values
        self.extra_bytes = 0

    def is_resident(self, value: int) -> bool:
        """Return whether the value has a holder."""
        return bool(self._holders[value])

    def holds(self, value: int, holder: str) -> bool:
        """Return whether this holder holds the value."""
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
        """Free the bytes of a value; its holders keep an empty storage."""
        before = self._counted_bytes(value)
        self._emptied[value] = self._holders.pop(value)
        self.extra_bytes -= before

    def refill(self, value: int) -> None:
        """Restore the bytes of an emptied value to its holders."""
        self._holders[value] = self._emptied.pop(value)
        self.extra_bytes += self._counted_bytes(value)

    def is_empty(self, value: int) -> bool:
        """Return whether a value is emptied."""
        return value in self._emptied

    def emptied(self) -> list[int]:
        """Return the values that are currently emptied, ascending."""
        return sorted(self._emptied)

    def forget(self, value: int) -> None:
        """Drop the record of an emptied value that has lost its last holder."""
        self._emptied.pop(value, None)

    def add_intermediate(self, value: int) -> None:
        """Count a replayed value that lives until its drop and has no holder."""
        self.extra_bytes += self._values[value].allocated_bytes

    def remove_intermediate(self, value: int) -> None:
        """Remove a value that was dropped or overwritten."""
        self.extra_bytes -= self._values[value].allocated_bytes

    def _counted_bytes(self, value: int) -> int:
        holders = self._holders[value]
        in_base = value not in self._activation_ids and STEP in holders
        return self._values[value].allocated_bytes if holders and not in_base else 0
