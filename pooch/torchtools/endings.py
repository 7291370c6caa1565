"""Finalizers that run even where Python loses one.

Python calls a finalizer once. If Ctrl-C comes at its entry, Python prints a note and does not call it again. So those
made here are looked through when the next step begins, and what was lost is made up for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

_MADE: list[weakref.finalize[Any, Any]] = []
_FIRST_LOOK = 1024  # finalizers
_next_look = [_FIRST_LOOK]  # at so many of them, those that were called are forgotten
_lock = threading.RLock()  # a finalizer may make others


def end_with(owner: object, end: Callable[..., object], *arguments: object) -> weakref.finalize[Any, Any]:
    """Call something once when an object is freed, or soon after; not when the interpreter ends.

    Args:
        owner: The object.
        end: What is called. It must not hold the owner.
        arguments: Its arguments.

    Returns:
        The finalizer. Calling it ends what it is for now.
    """
    finalizer = weakref.finalize(owner, end, *arguments)
    finalizer.atexit = False
    with _lock:
        _MADE.append(finalizer)
        if len(_MADE) >= _next_look[0]:  # steps that have nothing to make up for do not call `run_lost`
            _MADE[:] = [each for each in _MADE if each.alive]
            _next_look[0] = max(_FIRST_LOOK, 2 * len(_MADE))
    return finalizer


def run_lost() -> None:
    """Call what should have been called by now."""
    with _lock:
        waiting = [each for each in _MADE if each.alive]
        _MADE[:] = waiting
    for each in waiting:
        if each.peek() is None:  # its owner is gone
            each()
