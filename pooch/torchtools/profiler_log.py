"""Silences what PyTorch's profiler and allocator would write to stderr during Pooch's measurements.

Python's `warnings` and all other output to stderr are unaffected.
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
    """Context manager around the start of a profiler: Kineto reads its log level when the first one starts.

    If the program has used a profiler before or has set a level, that level stays.
    """
    is_ours = _LEVEL not in os.environ
    os.environ.setdefault(_LEVEL, _NOTHING)
    try:
        yield
    finally:
        if is_ours:
            del os.environ[_LEVEL]


@contextmanager
def quiet_allocator() -> Iterator[None]:
    """Context manager without "Memory block of unknown size was allocated before the profiling started".

    Every step frees such blocks (gradients of the previous step), which is fine. The C++ log has one level for all of
    PyTorch, which shows only errors meanwhile.
    """
    level = _log_level()
    if level is None:
        yield
        return
    before, level.value = level.value, max(level.value, _ERRORS_ALONE)
    try:
        yield
    finally:
        level.value = before


@cache
def _log_level() -> ctypes.c_int | None:
    """Returns the level of the C++ log, which no function of PyTorch sets; None if the library has no such variable."""
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libc10.so", "libc10.dylib", "c10.dll"):
        try:
            return ctypes.c_int.in_dll(ctypes.CDLL(str(folder / name)), "FLAGS_caffe2_log_level")
        except (OSError, ValueError):
            continue
    return None
