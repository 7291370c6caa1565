"""The calls that a plan replays, as they are recorded: in Python, or by the native watch."""

from __future__ import annotations

from typing import Any

from ..machine import Call
from .cursor import Cursor
from .table import ActionTable


class PlannedCalls:
    """Keeps the calls of one step that its plan replays.

    Args:
        table: The plan, indexed for lookups.
        cursor: Where the step is on the path. A native one has recorded calls.
        tainted: The values that the program may have changed through an address, and what is made of them.
    """

    def __init__(self, table: ActionTable, cursor: Cursor, tainted: set[int]) -> None:
        self._table, self._cursor, self._tainted = table, cursor, tainted

    def kept(self, position: int, call: Any, reads: tuple[int, ...], time_ms: float = 0.0) -> Call:
        """Return what is kept of a call.

        Args:
            position: Of its op on the path.
            call: The call.
            reads: The values of the step that it reads.
            time_ms: What a replay takes, as far as pressure has to know. The plan has chosen it for being fast.
        """
        copies, writes = self._table.copies, self._table.expected[position].writes
        foreign = not copies.foreign.isdisjoint(writes)
        recipe = hash((copies.number, self._table.first_slot + position))
        made = Call(call, reads, writes, time_ms, recipe, foreign)
        self.taint(made)
        return made

    def arrived(self) -> list[Call]:
        """Return the calls that the native watch has recorded since this was last called."""
        return [self.kept(position, call, call.reads) for position, call in self._cursor.take_calls()]

    def taint(self, call: Call) -> None:
        """Distrust what an op makes, if it reads what is distrusted."""
        if self._tainted and not self._tainted.isdisjoint(call.reads):
            self._tainted.update(call.writes)
