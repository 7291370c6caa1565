"""Tells threads apart. Their numbers do not: that of a thread that has ended is given to another."""

from __future__ import annotations

import sys
import threading
import weakref
from itertools import repeat

import torch

from .waiting_threads import does_wait


def _is_autograds() -> bool:
    """Whether the calling thread is one in which autograd runs what another has called for, as on a GPU.

    It does nothing of its own: while it works, the other waits in `backward()`, and counts.
    """
    in_pass = torch._C._current_graph_task_id() != -1
    return in_pass and isinstance(threading.current_thread(), threading._DummyThread)  # not begun in Python


class _Token:
    """Lives as long as its thread."""

    __slots__ = ("__weakref__",)


def _note(token: _Token) -> None:
    """Note that the calling thread trains, whose token it is, unless it does so for another one."""
    if not _is_autograds():
        _TRAINING[threading.get_ident()] = token


class _Here(threading.local):
    def __init__(self) -> None:
        self.token = _Token()
        _note(self.token)


_TRAINING: weakref.WeakValueDictionary[int, _Token] = weakref.WeakValueDictionary()  # by the numbers of their threads
_HERE = _Here()


class OwnThread:
    """The thread in which it was made."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token = weakref.ref(_HERE.token)

    @property
    def is_here(self) -> bool:
        """Whether it is the calling thread."""
        return self._token() is _HERE.token

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._token() is None

    @property
    def waits(self) -> bool:
        """Whether it waits or sleeps: it runs nothing until it is told to go on, or some time has passed."""
        token = self._token()
        there = threading.enumerate()
        numbers = [number for number, each in list(_TRAINING.items()) if each is token]
        return bool(numbers) and all(map(does_wait, map(sys._current_frames().get, numbers), repeat(there)))


def trains_here() -> None:
    """Note that the calling thread trains: it may do so again, even if it only waits when somebody looks."""
    _note(_HERE.token)


def is_alone() -> bool:
    """Whether no thread but the calling one may be training.

    Those do not count that wait or sleep, as the monitor of a progress bar, the threads of a notebook's kernel and
    the workers of a loader do, unless they have trained before: they may be about to go on with it. One that was told
    to go on, and does so once it has the interpreter, waits no longer. Nor do Pooch's own threads count, which are
    named after it, and those of packages that never train.
    """
    there = threading.enumerate()
    others = _others(there)
    if any(each.ident is None or each.ident in _TRAINING for each in others):  # without a number, it is about to begin
        return False
    # Frames are not kept: with its own among them, this call and those around it would live on, with all they know.
    numbers = [each.ident or 0 for each in others]
    return all(map(does_wait, map(sys._current_frames().get, numbers), repeat(there)))


def has_others() -> bool:
    """Whether there are threads of the program beside the calling one."""
    return bool(_others(threading.enumerate()))


def _others(there: list[threading.Thread]) -> list[threading.Thread]:
    here = threading.current_thread()
    return [each for each in there if each is not here and not _never_trains(each)]


_PACKAGES = frozenset({"_pydevd_bundle", "debugpy", "ipykernel", "pydevd", "tqdm", "zmq"})  # with threads of their own


def _never_trains(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return thread.name.startswith("pooch-") or any(each.partition(".")[0] in _PACKAGES for each in modules)
