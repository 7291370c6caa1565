"""Interrupts code at every one of its byte codes, one after the other, as Ctrl-C would."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
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
            sys.settrace(self._entered)
            function()
        except KeyboardInterrupt:
            pass
        except ctypes.ArgumentError as error:  # which ctypes makes of what comes while it looks at an argument
            if "KeyboardInterrupt" not in str(error):
                raise
        finally:
            sys.settrace(None)
        return self.place is not None

    def _entered(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self.place is not None or not frame.f_code.co_filename.startswith(self._folders):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._ran

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Any:
        at = frame.f_code, frame.f_lasti
        if event == "opcode" and self.place is None and at not in self._seen:
            self._seen.add(at)
            if len(self._seen) % self._every:
                return self._ran
            self.place = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}, byte code {frame.f_lasti}"
            sys.settrace(None)
            CTRL_C.again  # noqa: B018
            return None
        return self._ran
