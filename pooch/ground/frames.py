"""Local variables of functions that are running, which stay alive no longer for having been looked at."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

_IS_SNAPSHOT = sys.version_info < (3, 13)  # later, `f_locals` reads the variables themselves
_UNSHARED = 3  # references to a snapshot: of the frame, of a variable here, and the argument of what counts them


def local_of(frame: FrameType, name: str) -> object:
    """Return a local variable of a frame, or None if it has none of that name.

    Up to Python 3.12, `f_locals` of a function is a dictionary that stays with the frame, so that what the function
    lets go of would live until it returns. Unless somebody else holds the dictionary, as by `locals()`, it is emptied.

    Args:
        frame: The frame.
        name: Of the variable.
    """
    found = frame.f_locals
    value = found.get(name)
    if _IS_SNAPSHOT and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(found) == _UNSHARED:
        found.clear()
    return value
