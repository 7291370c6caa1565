"""Measures a peak on the CPU around the program's own code, without a `with` statement in it.

The measurement lasts from now on until the backward pass returns. The counting allocator counts, where there is one
that nobody else uses. Otherwise the CPU allocator reports to torch's profiler, whose records lie between the tensors
and stretch the heap of the process. Its sessions belong to a thread and cannot be ended during a backward pass, since
the engine restores the thread's state when it returns. While a window is open, the function through which every
backward pass runs therefore reports when one has returned, and the function that prepares a profiler closes the window
first, so a session of the user's always takes precedence.
"""

from __future__ import annotations

import atexit
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .cpu_allocator import CountingAllocator, counting_allocator
from .malloc import trim_freed_memory
from .memory_trace import MemoryTrace, MemoryTracer, live_tensors, marker
from .tensors import storage_key
from .watch import address_of

_MARK = "mark of a window"


class PeakWindow:
    """A measurement; a process has at most one at a time.

    The figure counts up to the last `mark()`. What was live at the start and was freed is subtracted from
    the next mark on.

    Args:
        backward_returned: called after each backward pass of this thread, with whether it failed.
        interrupted: called when the user starts a profiler; it has to close the window.

    Attributes:
        start_bytes: bytes of all tensors that were live when the window was opened.
    """

    _exclusive: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, backward_returned: Callable[[bool], None], interrupted: Callable[[], None]) -> None:
        self._backward_returned, self._interrupted = backward_returned, interrupted
        self._recorder: _Traced | _Counted | None = None
        self._thread = threading.get_ident()
        self._backward_depth = 0
        self._undo: list[Callable[[], None]] = []
        self._at_start: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.start_bytes = 0

    def open(self) -> bool:
        """Starts measuring; returns False if a profiler is already running, be it the user's or another window's."""
        if not self._exclusive.acquire(blocking=False):
            return False
        counted = None
        try:
            if torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
                return False
            counted = _counted()
            gc.collect()
            recorder = counted or _Traced()
            storages = _live_storages()
            self.start_bytes = sum(storage.nbytes() for storage in storages)
            self._at_start = [(weakref.ref(each), each.nbytes()) for each in storages if not recorder.sees_end_of(each)]
            self._replace(torch.autograd, "_engine_run_backward", self._around_backward)
            self._replace(torch.autograd.profiler, "_prepare_profiler", self._before_a_profiler)
            recorder.start()
            self._recorder = recorder
            atexit.register(self.close)  # an interpreter that ends with a session open crashes
            return True
        finally:
            if self._recorder is None:
                if counted is not None:
                    counted.stop()
                self._give_back()

    @property
    def is_mine(self) -> bool:
        """Whether this thread opened the window; no other thread can close it."""
        return threading.get_ident() == self._thread

    @property
    def is_in_backward(self) -> bool:
        """Whether this thread is running a backward pass."""
        return self._backward_depth > 0

    def mark(self) -> None:
        """Makes everything up to now count. It must not be called within a dispatch mode."""
        if self._recorder is not None and self.is_mine:
            self._recorder.mark(sum(size for storage, size in self._at_start if storage() is None))

    def close(self) -> int | None:
        """Stops measuring; returns the peak up to the last mark, None if closed or owned by another thread."""
        recorder = self._recorder
        if recorder is None or not self.is_mine:
            return None
        self._recorder = None
        atexit.unregister(self.close)
        try:
            return self.start_bytes + recorder.stop()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        for undo in self._undo:
            undo()
        self._undo, self._at_start = [], []
        self._exclusive.release()

    def _replace(self, module: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(module, name)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self._recorder is None or not self.is_mine:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        def undo() -> None:
            if getattr(module, name) is replacement:  # else it was wrapped since, and the replacement passes calls on
                setattr(module, name, original)

        setattr(module, name, replacement)
        self._undo.append(undo)

    def _around_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._backward_depth += 1
        failed = True
        try:
            result = original(*args, **kwargs)
            failed = False
            return result
        finally:
            self._backward_depth -= 1
            if self._backward_depth == 0:
                self._backward_returned(failed)

    def _before_a_profiler(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.is_in_backward:
            self._interrupted()
        return original(*args, **kwargs)


def _live_storages() -> list[torch.UntypedStorage]:
    return list({storage_key(t): t.untyped_storage() for t in live_tensors()}.values())


class _Traced:
    """Measures with torch's profiler."""

    def __init__(self) -> None:
        self._tracer = MemoryTracer(torch.device("cpu"))
        self._died_bytes: list[int] = []
        self.start = self._tracer.start

    def sees_end_of(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether the end of what is live at the start takes its bytes off: of nothing here, see `_highest`."""
        return False

    def mark(self, died_bytes: int) -> None:
        """Makes everything up to now count; `died_bytes` of what was live at the start and unseen are gone."""
        with marker(f"{_MARK} {len(self._died_bytes)}"):
            pass
        self._died_bytes.append(died_bytes)

    def stop(self) -> int:
        """Stops measuring, and returns the highest number of bytes above the start up to the last mark."""
        try:
            return self._highest(self._tracer.stop())
        finally:
            trim_freed_memory()  # of the records

    def _highest(self, trace: MemoryTrace) -> int:
        """Returns the highest number of bytes above the start up to the last mark."""
        starts = [each.start_ns for each in trace.markers if each.name.startswith(_MARK)]
        marks = list(zip(starts, self._died_bytes, strict=True))
        live = highest = taken_off = reached = 0
        made: set[int] = set()
        for event in trace.events:
            while reached < len(marks) and event.time_ns >= marks[reached][0]:
                died = marks[reached][1]
                live, taken_off, reached = live - (died - taken_off), died, reached + 1
            if reached == len(marks):
                break
            if event.size_bytes > 0:
                made.add(event.pointer)
            elif event.pointer not in made:
                continue  # the profiler knows it from an earlier session: it was live at the start
            live += event.size_bytes
            highest = max(highest, live)
        return highest


class _Counted:
    """Measures with the counting allocator."""

    def __init__(self, allocator: CountingAllocator) -> None:
        self._allocator = allocator
        self._highest = self._died_bytes = self._before_bytes = 0

    def start(self) -> None:
        """Starts measuring; the allocator is in place already."""
        self._allocator.reset_peak()
        self._before_bytes = self._allocator.live_bytes()

    def sees_end_of(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether the end of what is live at the start takes its bytes off, as of what was counted before."""
        return self._allocator.knows(address_of(storage))

    def mark(self, died_bytes: int) -> None:
        """Makes everything up to now count; `died_bytes` of what was live at the start and unseen are gone."""
        self._highest = max(self._highest, self._allocator.peak_bytes() - self._before_bytes - self._died_bytes)
        self._died_bytes = died_bytes
        self._allocator.reset_peak()

    def stop(self) -> int:
        """Stops measuring, and returns the highest number of bytes above the start up to the last mark."""
        self._allocator.remove(self)
        return self._highest


def _counted() -> _Counted | None:
    """The counting allocator, in place, or None if there is none or it is in use: its peak has one reader."""
    allocator = counting_allocator()
    if isinstance(allocator, str) or allocator.has_reader:
        return None
    counted = _Counted(allocator)
    return counted if allocator.install(counted) else None
