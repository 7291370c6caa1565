"""Where a step is on the path of its plan."""

from __future__ import annotations

from typing import Any


class Cursor:
    """Where a step is on the path of its plan. A native region has the same attributes.

    Attributes:
        on_path: Whether the step still does what the plan expects.
        position: Number of ops that were recognised.
        needs_attention: Whether something is to be looked at before each op, even if it is the expected one.
        preserves: Whether ops that write have to be looked at, as they may change what replays read.
        is_reassigned: Whether the program has given a saved tensor other data.
        is_native: Whether a native watch follows the path.
    """

    __slots__ = ("is_reassigned", "needs_attention", "on_path", "position", "preserves")
    is_native = False

    def __init__(self) -> None:
        self.on_path, self.position = True, 0
        self.needs_attention = self.preserves = self.is_reassigned = False

    def note_away(self, key: int, is_away: bool) -> None:
        """Note whether the bytes of a storage are away while the program holds it. A mode asks for each op."""

    def take_kept(self) -> list[Any]:
        """Return what autograd holds natively for values that are kept: nothing."""
        return []


class NativeUse:
    """Whether the native watch sees a plan's path as the dispatch mode does under which it was profiled.

    A program may look for modes itself, and do other things where it finds one. Where the watch leaves a
    path that it has never followed to its end, the mode is back for later steps.

    Attributes:
        is_refused: Whether the mode is to watch.
    """

    def __init__(self) -> None:
        self.is_refused = False
        self._is_proven = False

    def completed(self, cursor: Cursor) -> None:
        """Note that a step has followed the path to its end."""
        self._is_proven = self._is_proven or cursor.is_native

    def left(self, cursor: Cursor) -> None:
        """Note that a step has left the path."""
        self.is_refused = self.is_refused or (cursor.is_native and not self._is_proven)
