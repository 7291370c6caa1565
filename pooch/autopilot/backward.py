"""Tells when a backward pass begins and ends, whoever starts it: `loss.backward()`, `torch.autograd.grad`, a framework.

All of them go through one function of `torch.autograd.graph`, which is wrapped while anything listens. What somebody
else wraps around ours stays: ours is taken away when the place holds it, and until then it passes everything on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..torchtools.watch import LIBRARY

_NAME = "_engine_run_backward"
# Our wrappers and what they wrap. An attribute of theirs would be copied to what is wrapped around them.
_OURS: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()
_PLACES = (torch.autograd.graph, torch.autograd)  # the second has its own reference
_transform: Any = torch._C._functorch.peek_interpreter_stack
_tracing: Any = torch._guards.TracingContext.try_get


class _Running(threading.local):
    """What the calling thread runs.

    Attributes:
        depth: Number of backward passes, one within the other.
        device: Where what the outermost one began with lies.
        afterwards: What is to be called once the outermost one is over.
    """

    depth = 0
    device: torch.device | None = None

    def __init__(self) -> None:
        self.afterwards: list[Callable[[], object]] = []


RUNNING = _Running()


@contextmanager
def own_passes() -> Iterator[None]:
    """Context manager around backward passes of Pooch's own, of which nobody is told."""
    RUNNING.depth += 1
    try:
        yield
    finally:
        RUNNING.depth -= 1


class BackwardWatch:
    """Calls its listeners around each outermost backward pass of a thread.

    Args:
        begin: A method that is called before it begins, with whether it builds a graph of its own. Its object is not
            kept alive.
        end: A method of the same object that is called after it ended, with whether it ended without an error, and the
            same.
    """

    _listeners: tuple[BackwardWatch, ...] = ()  # of the process, like what it wraps
    _lock = threading.Lock()

    def __init__(self, begin: Callable[[bool], None], end: Callable[[bool, bool], None]) -> None:
        self._owner = weakref.ref(begin.__self__)  # type: ignore[attr-defined]
        self._begin, self._end = begin.__func__, end.__func__  # type: ignore[attr-defined]

    @classmethod
    def only(cls, watch: BackwardWatch) -> tuple[BackwardWatch, ...] | None:
        """Return the listeners, if that is the only one."""
        return cls._listeners if cls._listeners == (watch,) else None

    @staticmethod
    def is_running() -> bool:
        """Whether the calling thread runs a backward pass."""
        return RUNNING.depth > 0

    @staticmethod
    def after(undo: Callable[[], object]) -> None:
        """Have something called once the backward pass that the calling thread runs is over."""
        RUNNING.afterwards.append(undo)

    def tell_begin(self, builds_graph: bool) -> None:
        """Tell of the begin of a backward pass."""
        owner = self._owner()
        if owner is not None:
            self._begin(owner, builds_graph)

    def tell_end(self, is_finished: bool, builds_graph: bool) -> None:
        """Tell of its end."""
        owner = self._owner()
        if owner is not None:
            self._end(owner, is_finished, builds_graph)

    def start(self) -> None:
        """Begin to listen."""
        cls = type(self)
        with cls._lock:
            cls._listeners += (self,)
            if len(cls._listeners) == 1:
                for place in _PLACES:
                    if not _is_within(getattr(place, _NAME)):
                        setattr(place, _NAME, _wrapped(getattr(place, _NAME)))

    def stop(self) -> None:
        """Listen no longer."""
        cls = type(self)
        with cls._lock:
            if self not in cls._listeners:
                return
            cls._listeners = tuple(each for each in cls._listeners if each is not self)
            if not cls._listeners:
                for place in _PLACES:
                    _take_away(place)


def _is_within(function: Callable[..., Any]) -> bool:
    """Whether a wrapper of ours is in place, perhaps within others that say what they wrap."""
    found: Any = function
    while found is not None and found not in _OURS:
        found = getattr(found, "__wrapped__", None)
    return found is not None


def _take_away(place: Any) -> None:
    """Take our wrapper away, unless somebody has put another one around it, which then goes on calling it."""
    original = _OURS.get(getattr(place, _NAME))
    if original is not None:
        setattr(place, _NAME, original)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # Part of a forward pass: within a transform such as `torch.func.grad`, or a compiler that traces one.
        if _transform() is not None or _tracing() is not None:
            return original(*args, **kwargs)
        running = RUNNING
        depth = running.depth
        builds_graph = bool(args[3] if len(args) > 3 else kwargs.get("create_graph", False))
        listeners = () if depth else BackwardWatch._listeners
        if listeners:
            running.device = getattr(args[0][0], "device", None) if args and args[0] else None
        for listener in listeners:
            listener.tell_begin(builds_graph)
        running.depth = depth + 1
        finished = False
        try:
            result = original(*args, **kwargs)
            finished = True
            return result
        finally:
            running.depth = depth
            while not depth and running.afterwards:
                running.afterwards.pop()()
            for listener in listeners:
                listener.tell_end(finished, builds_graph)

    library = LIBRARY.loaded
    ours: Callable[..., Any] = run_backward if library is None else library.BackwardPasses(original, run_backward)
    _OURS[ours] = original
    return ours
