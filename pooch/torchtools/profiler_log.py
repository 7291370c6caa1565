"""Silence for what PyTorch's profiler and allocator would write to stderr while they measure for us.

Python's `warnings` and whatever else is written to stderr pass.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

_LEVEL, _NOTHING = "KINETO_LOG_LEVEL", "99"
_ERRORS_ALONE = 2


@contextmanager
def quiet_start() -> Iterator[None]:
    """Around the start of a profiler: Kineto ("USDT: profiler_start") reads how much it should log at its first one.

    Where the program has used a profiler before, or has set a level, that stays as it is.
    """
    is_ours = _LEVEL not in os.environ
    os.environ.setdefault(_LEVEL, _NOTHING)
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_LEVEL]


class QuietAllocator:
    """While memory is profiled: no "Memory block of unknown size was allocated before the profiling started".

    Every step frees such blocks (gradients of the step before), and they are known to us. The C++ log has one level for
    all of PyTorch; it shows errors alone between `begin` and `end`.
    """

    def __init__(self) -> None:
        self._before: int | None = None

    def begin(self) -> None:
        """From here on."""
        level = _log_level()
        if level is not None:
            self._before, level.value = level.value, max(level.value, _ERRORS_ALONE)

    def end(self) -> None:
        """Until here."""
        level = _log_level()
        if level is not None and self._before is not None:
            level.value = self._before


@cache
def _log_level() -> ctypes.c_int | None:
    """The level of the C++ log, which no function of PyTorch sets; None where its library has none by that name."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libc10.so", "libc10.dylib", "c10.dll"):
        try:
            return ctypes.c_int.in_dll(ctypes.CDLL(str(folder / name)), "FLAGS_caffe2_log_level")
        except (OSError, ValueError):
            continue
    return None
