"""Interrupts code at every one of its byte codes, one after the other, as Ctrl-C would."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pooch
from pooch.torchtools.lost_interrupts import CTRL_C

_HOME = Path(pooch.__file__).parent


class Interrupts:
    """Interrupts the functions of some rooms of Pooch once at each byte code, over many calls.

    Args:
        rooms: Their folders, such as "executor".
        every: Of so many byte codes one is taken, from the first function on.
    """

    def __init__(self, *rooms: str, every: int = 1) -> None:
        self._every = every
        self._folders = tuple(f"{_HOME / room}/" for room in rooms)
        self._seen: set[tuple[CodeType, int]] = set()
        self.place: str | None = None

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._seen)

    def next(self, function: Callable[[], object]) -> bool:
        """Call a function that is interrupted where it was not before, and return whether there was such a place.

        It may end all the same: Python only prints what is raised in a finalizer.
        """
        self.place = None
        try:
            with _told_of_byte_codes(self._is_looked_at, self._reached):
                function()
                for _ in range(2):  # what came at its very end is raised here
                    pass
        except KeyboardInterrupt:
            pass
        except ctypes.ArgumentError as error:  # which ctypes makes of what comes while it looks at an argument
            if "KeyboardInterrupt" not in str(error):
                raise
        return self.place is not None

    def _is_looked_at(self, code: CodeType) -> bool:
        return self.place is None and code.co_filename.startswith(self._folders)

    def _reached(self, code: CodeType, at: int, line: int | None) -> bool:
        """Whether the byte code that comes next is where it is interrupted."""
        if self.place is not None or (code, at) in self._seen:
            return False
        self._seen.add((code, at))
        if len(self._seen) % self._every:
            return False
        self.place = f"{code.co_filename.rpartition('/')[2]}:{line}, byte code {at}"
        return True


_IsLookedAt = Callable[[CodeType], bool]
_Reached = Callable[[CodeType, int, int | None], bool]


@contextmanager
def _traced(is_looked_at: _IsLookedAt, reached: _Reached) -> Iterator[None]:
    """Asks before each byte code of some functions, in this thread, whether to press Ctrl-C."""

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_looked_at(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return ran

    def ran(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and reached(frame.f_code, frame.f_lasti, frame.f_lineno):
            sys.settrace(None)
            CTRL_C.again  # noqa: B018
            return None
        return ran

    sys.settrace(entered)
    try:
        yield
    finally:
        sys.settrace(None)


@contextmanager
def _monitored(is_looked_at: _IsLookedAt, reached: _Reached) -> Iterator[None]:
    """As `_traced`, which from 3.12 on tells only of the first byte code of functions that were traced before."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    events, thread, looked_at = monitoring.events, threading.get_ident(), set[CodeType]()

    def entered(code: CodeType, at: int) -> None:
        if threading.get_ident() == thread and code not in looked_at and is_looked_at(code):
            looked_at.add(code)
            monitoring.set_local_events(_TOOL, code, events.INSTRUCTION)

    def ran(code: CodeType, at: int) -> None:
        if threading.get_ident() == thread and reached(code, at, sys._getframe(1).f_lineno):
            end()  # else the next call of this function would be interrupted, where Python looks for no signals
            CTRL_C.again  # noqa: B018

    def end() -> None:
        monitoring.set_events(_TOOL, 0)
        for code in looked_at:
            monitoring.set_local_events(_TOOL, code, 0)

    monitoring.use_tool_id(_TOOL, "interrupts")
    monitoring.register_callback(_TOOL, events.PY_START, entered)
    monitoring.register_callback(_TOOL, events.INSTRUCTION, ran)
    monitoring.set_events(_TOOL, events.PY_START)
    try:
        yield
    finally:
        end()
        monitoring.register_callback(_TOOL, events.PY_START, None)
        monitoring.register_callback(_TOOL, events.INSTRUCTION, None)
        monitoring.free_tool_id(_TOOL)


_TOOL = 4  # none of those that `sys.monitoring` has names for
_told_of_byte_codes = _monitored if sys.version_info >= (3, 12) else _traced
