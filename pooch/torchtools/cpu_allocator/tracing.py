"""Traces of the CPU's memory in one thread, recorded by the counting allocator and an observer of PyTorch's operators.

They are what torch's profiler tells of the thread, without the profiler: any number of threads may record at once,
while the program's own profiler starts, runs and stops.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ...ground.native import BuildError, Signatures, bound_functions
from .building import built_observer
from .counting import CountingAllocator, counting_allocator

Integers = npt.NDArray[np.int64]
_ARRAY = np.ctypeslib.ndpointer(dtype=np.int64, flags="C_CONTIGUOUS")
_SIGNATURES: Signatures = {
    "begin": ([ctypes.c_int64], None),
    "end": ([ctypes.c_int64], None),
    "forget": ([ctypes.c_int64], None),
    "enter": ([ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int], None),
    "leave": ([ctypes.c_void_p], None),
    "is_here": ([], ctypes.c_int),
    "counts": ([ctypes.c_int64, _ARRAY], None),
    "read": ([ctypes.c_int64, _ARRAY, _ARRAY, ctypes.c_char_p], None),
}
_OBSERVER: Signatures = {
    "use": ([ctypes.c_void_p, ctypes.c_void_p], None),
    "leave": ([], None),
    "begin_child": ([], None),
}


@dataclass(frozen=True, slots=True)
class RawTrace:
    """What a session has recorded, as in `step_trace.h`. Times are in ns; names are numbers, -1 for none.

    Attributes:
        names: the names.
        memory: rows of time, address, and bytes (negative for a free).
        spans: rows of whether it is a marker, name, start, end, name of the autograd node that runs it, and name of the
            operator around the operator that runs it.
    """

    names: tuple[str, ...]
    memory: Integers
    spans: Integers


class ThreadTraces:
    """Sessions that record what happens in the thread that begins them. See `thread_traces`.

    Args:
        allocator: The counting allocator.
        library: Its library.
        observer: The library of the observer.
    """

    def __init__(self, allocator: CountingAllocator, library: ctypes.PyDLL, observer: ctypes.PyDLL) -> None:
        self._allocator = allocator
        self._functions = bound_functions(library, "pooch_trace", _SIGNATURES)
        self._observer = bound_functions(observer, "pooch_observer", _OBSERVER)
        self._callbacks = [ctypes.cast(self._functions[name], ctypes.c_void_p) for name in ("enter", "leave")]
        self._keys = itertools.count(1)  # no function of PyTorch's lies at such an address
        self._numbers = itertools.count(1)
        self._open = set[int]()
        self._lock = threading.RLock()  # the garbage collector may end a session while one begins
        os.register_at_fork(after_in_child=self._observer["begin_child"])

    def can_begin(self) -> bool:
        """Return whether no other CPU allocator than PyTorch's is in place."""
        try:
            return self._allocator.install(self, reads_peak=False)
        finally:
            self._allocator.remove(self)

    def new_session(self) -> int:
        """Return the number of a session that has not begun."""
        return next(self._numbers)

    def begin(self, session: int) -> bool:
        """Begin a session of the calling thread, whose caller calls `forget` even if this call was interrupted.

        Returns:
            False if another CPU allocator than PyTorch's is in place.
        """
        with self._lock:
            if not self._allocator.install(("session", session), reads_peak=False):
                return False
            self._open.add(session)
            self._observer["use"](*self._callbacks)
            self._functions["begin"](session)
            return True

    def end(self, session: int) -> RawTrace:
        """End a session, in whatever thread, and return what it has recorded."""
        try:
            self._end(session)
            return self._read(session)
        finally:
            self.forget(session)

    def forget(self, session: int) -> None:
        """End a session, if that is not done, with all that it has recorded. Calling it again does nothing."""
        self._end(session)
        self._functions["forget"](session)

    def _end(self, session: int) -> None:
        with self._lock:
            self._functions["end"](session)
            self._open.discard(session)
            if not self._open:
                self._observer["leave"]()
            self._allocator.remove(("session", session))

    def _read(self, session: int) -> RawTrace:
        counts = np.zeros(3, dtype=np.int64)
        self._functions["counts"](session, counts)
        events, spans, length = counts.tolist()
        rows = np.zeros((events, 3), np.int64), np.zeros((spans, 6), np.int64)
        names = ctypes.create_string_buffer(length)
        self._functions["read"](session, *rows, names)
        return RawTrace(tuple(names.raw.decode(errors="replace").split("\0")[:-1]), *rows)

    @property
    def is_here(self) -> bool:
        """Whether a session records the calling thread."""
        return bool(self._functions["is_here"]())

    def marked(self, name: str) -> AbstractContextManager[None]:
        """Context manager around a period that the sessions of the calling thread record."""
        return _Marked(self._functions["enter"], self._functions["leave"], next(self._keys), name)


class _Marked(AbstractContextManager[None]):
    """A period. Each op of a recorded step is one, and a generator would take longer.

    Args:
        enter: Notes its begin.
        leave: Notes its end.
        key: Tells it from others.
        name: Its name.
    """

    __slots__ = ("_enter", "_key", "_leave", "_name")

    def __init__(self, enter: Any, leave: Any, key: int, name: str) -> None:
        self._enter, self._leave, self._key, self._name = enter, leave, key, name

    def __enter__(self) -> None:
        self._enter(self._key, self._name.encode(), 1)

    def __exit__(self, *exception: object) -> None:
        self._leave(self._key)


_made: list[ThreadTraces] = []


def traces_here() -> ThreadTraces | None:
    """Return what records the calling thread, or None if nothing does."""
    return _made[0] if _made and _made[0].is_here else None


@cache
def thread_traces() -> ThreadTraces | str:
    """Return what records threads, or in a few words why there is none. It is compiled on first use."""
    allocator = counting_allocator()
    if isinstance(allocator, str):
        return allocator
    try:
        try:
            observer = _loaded(str(built_observer()))
        except OSError:  # a file that a full disk or a crash left behind
            observer = _loaded(str(built_observer(again=True)))
        _made.append(ThreadTraces(allocator, allocator.library, observer))
        return _made[0]
    except (BuildError, OSError, AttributeError) as error:
        return str(error)


def _loaded(path: str) -> Any:
    return ctypes.PyDLL(path)
