"""Tells threads apart. Their numbers do not: that of a thread that has ended is given to another."""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType


class _Token:
    """Lives as long as its thread."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    def __init__(self) -> None:
        self.token = _Token()
        _TRAINING[threading.get_ident()] = self.token


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


def is_alone() -> bool:
    """Whether no thread but the calling one may be training.

    Those do not count that wait for something, as the monitor of a progress bar, the threads of a notebook's kernel and
    the workers of a loader do, unless a step of theirs was governed before: they may be about to go on with it. Nor do
    Pooch's own threads, which are named after it.
    """
    here = threading.current_thread()
    others = [each for each in threading.enumerate() if each is not here and not each.name.startswith("pooch-")]
    if not others:
        return True
    if any(each.ident in _TRAINING for each in others):
        return False
    # Not kept: with its own frame in it, this call and those around it would live on, with all that they know. A thread
    # without a frame, as those of autograd are between steps, runs no Python code.
    return all(map(_waits, map(sys._current_frames().get, [each.ident or 0 for each in others])))


_WAITING = frozenset(  # where a thread is that waits, by module and function
    {
        ("concurrent.futures.thread", "_worker"),
        ("multiprocessing.connection", "_recv"),
        ("queue", "get"),
        ("selectors", "select"),
        ("socket", "accept"),
        ("socket", "readinto"),
        ("subprocess", "_try_wait"),
        ("threading", "_wait_for_tstate_lock"),
        ("threading", "join"),
        ("threading", "wait"),
        ("torch._inductor.compile_worker.subproc_pool", "_recv_msg"),
    }
)
_NEVER_TRAIN = frozenset({"debugpy", "ipykernel", "pydevd", "tqdm", "zmq"})  # packages that run threads of their own


def _waits(frame: FrameType | None) -> bool:
    if frame is None:
        return True
    module = str(frame.f_globals.get("__name__"))
    return (module, frame.f_code.co_name) in _WAITING or module.partition(".")[0] in _NEVER_TRAIN
