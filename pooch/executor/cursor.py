"""Where a step is on the path of its plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from ..ir import ExpectedOp
from ..torchtools.operators import MODE_ALONE

# Values that a step itself numbers. A plan numbers its own from 0.
FIRST_VALUE = 2**40


class Cursor:
    """Where a step is on the path of its plan. A native region has the same attributes.

    Attributes:
        on_path: Whether the step still does what the plan expects.
        position: Number of ops that were recognised.
        needs_attention: Whether something is to be looked at before each op, even if it is the expected one.
        is_reassigned: Whether the program has given a saved tensor other data.
        sources: Storages of values that replays will read, by number.
        made: Storages of values that are to be copied out.
        is_recorded: Whether the call of the op that begins was recorded natively.
        has_readers: Whether calls that were recorded natively have read anything from outside of the step.
        is_native: Whether a native watch follows the path.
        has_kept: Whether autograd holds anything natively that `take_kept` would return.
        ops: What tells the ops of the forward pass so far from others; 0: nothing does.
    """

    __slots__ = ("_numbers", "_saves", "is_reassigned", "made", "needs_attention", "on_path", "position", "sources")
    is_native = is_recorded = has_readers = has_kept = False
    ops = 0

    def __init__(self) -> None:
        self.on_path, self.position = True, 0
        self.sources: dict[int, torch.UntypedStorage] = {}
        self._numbers, self._saves = itertools.count(FIRST_VALUE), itertools.count(1)
        self.made: dict[int, torch.UntypedStorage] = {}
        self.needs_attention = self.is_reassigned = False

    def note_away(self, key: int, is_away: bool) -> None:
        """Note whether the bytes of a storage are away while the program holds it. A mode asks for each op."""

    def record_on(self, first_node: int, places: int) -> None:
        """Number and record ops natively, as the step has left its plan. A mode passes each op to the step anyway."""

    def next_save(self) -> int:
        """Return the position of the next save among all of this step that are numbered."""
        return next(self._saves)

    def next_number(self) -> int:
        """Return the number of the next value that is not the plan's."""
        return next(self._numbers)

    def note_call(self, writes: tuple[int, ...], recipe: int) -> None:
        """Note a call that was recorded in Python, which native ones build upon."""

    def forget(self, numbers: set[int]) -> None:
        """Note values that can no longer be made again."""

    def outdated(self, key: int) -> list[int]:
        """Return the first values made by calls recorded natively that have read a storage: none."""
        return []

    def note_handed_out(self, key: int) -> None:
        """Note a storage whose address the program has."""

    def take_unplanned(self) -> list[Any]:
        """Return the calls of a step without a plan that were recorded natively since this was last called: none."""
        return []

    def note_read(self, key: int) -> None:
        """Note a storage that a recorded call has read, and that must not change. A mode looks at each write."""

    def wait_for(self, keys: list[int]) -> None:
        """Look before the next op after one of these storages was released. A mode looks before each op."""

    def preserve(self, key: int) -> None:
        """Copy a storage that an op is about to change, for the calls that were recorded natively: there are none."""

    def take_calls(self) -> list[Any]:
        """Return the positions and calls of ops that were recorded natively since this was last called: none."""
        return []

    def is_written_over(self, number: int) -> bool:
        """Whether a value that autograd keeps was written over. A mode tells the step."""
        return False

    def take_kept(self, least_bytes: int) -> list[Any]:
        """Return what autograd holds natively for values of at least so many bytes that are kept: nothing."""
        return []


class NativeUse:
    """Whether the native watch sees a plan's path as the dispatch mode does under which it was profiled.

    A program may look for modes itself, and do other things where it finds one. Where the watch leaves a
    path that it has never followed to its end, the mode is back for later steps.

    Args:
        expected: The ops of the path. Where PyTorch runs one of them under a mode alone, the mode is there from the
            first step on.

    Attributes:
        is_refused: Whether the mode is to watch.
        is_proven: Whether the watch has followed the path to its end.
    """

    def __init__(self, expected: Iterable[ExpectedOp] = ()) -> None:
        self.is_refused = any(op.name in MODE_ALONE for op in expected)
        self.is_proven = self._is_proven_by_mode = False

    def completed(self, cursor: Cursor) -> None:
        """Note that a step has followed the path to its end."""
        self.is_proven = self.is_proven or cursor.is_native
        self._is_proven_by_mode = self._is_proven_by_mode or not cursor.is_native

    def left(self, cursor: Cursor) -> None:
        """Note that a step has left the path. Where a mode leaves it as well, it was not for the watch."""
        if cursor.is_native:
            self.is_refused = self.is_refused or not self.is_proven
        elif not self._is_proven_by_mode:
            self.is_refused = False
