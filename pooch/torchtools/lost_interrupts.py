"""Ctrl-C that comes while a destructor or a callback of Pooch's runs, where Python prints it and goes on.

A backward pass runs hardly any other Python code, so much of what the user presses would end there. While a budget is
held, it is raised as soon as the destructor or callback has returned, and nothing is printed.
"""

from __future__ import annotations

import _thread
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from .stand_ins import Place, StandIns

_OURS = {__name__.partition(".")[0], "torch", "weakref", "_weakrefset"}


class _Signal(int):
    """Reading `again` is as if Ctrl-C were pressed just then.

    A function that is called for that would itself be interrupted at its end, where it was called. A property in C
    has none: Python raises `KeyboardInterrupt` where it next looks for signals, which is not where a function returns.
    """

    again = property(_thread.interrupt_main)


CTRL_C = _Signal(signal.SIGINT)


class _Unraisable:
    """Stands in for `sys.unraisablehook`."""

    def __init__(self, original: Callable[[Any], Any]) -> None:
        self.__wrapped__ = original

    def __call__(self, unraisable: Any) -> None:
        called = _called(unraisable)
        is_lost = issubclass(unraisable.exc_type, KeyboardInterrupt) and called.is_ours
        keep_interrupt = getattr(called.owner, "keep_interrupt", None)
        if is_lost and keep_interrupt is not None:  # raised once the op in whose middle this is has ended
            keep_interrupt()
        elif is_lost and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            CTRL_C.again  # noqa: B018
        else:
            self.__wrapped__(unraisable)


class _Called(NamedTuple):
    """What Python called, and could not raise an error of: whether that was for Pooch, as far as can be told.

    Weak collections do not say whose they are.
    """

    is_ours: bool
    owner: object = None


def _called(unraisable: Any) -> _Called:
    """Looks at the function, or, where Python does not tell it, at its frame.

    From Python 3.13 on, functions that ctypes calls are only in the text of the message, and from 3.14 on also
    destructors and callbacks of weak references.
    """
    function, trace = unraisable.object, unraisable.exc_traceback
    if isinstance(function, weakref.finalize):  # which does not tell any more what it was to call
        return _Called(True)
    if function is not None:
        return _Called(_is_ours(getattr(function, "__module__", "")), getattr(function, "__self__", None))
    if trace is None:
        return _Called(False)
    frame = trace.tb_frame
    return _Called(_is_ours(frame.f_globals.get("__name__")), frame.f_locals.get("self"))


def _is_ours(module: object) -> bool:
    return str(module).partition(".")[0] in _OURS


LOST_INTERRUPTS = StandIns(Place(sys, "unraisablehook", _Unraisable))
