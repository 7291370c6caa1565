"""What the simulated device found wrong, and what it did when."""

from __future__ import annotations

import ctypes
from pathlib import Path


def is_simulated() -> bool:
    """Whether this process runs on the simulated device."""
    return hasattr(ctypes.CDLL(None), "simulated_cuda_take_mistakes")


def take_mistakes() -> list[str]:
    """What was found since the last call, and forget it: races, uses of what was destroyed, calls not simulated."""
    take = ctypes.CDLL(None).simulated_cuda_take_mistakes
    take.restype = ctypes.c_uint64
    text = ctypes.create_string_buffer(1 << 20)
    take(text, ctypes.c_uint64(len(text)))
    return text.value.decode().splitlines()


def start_timeline() -> None:
    """Write down from now on what each stream does."""
    ctypes.CDLL(None).simulated_cuda_start_timeline()


def write_timeline(path: Path) -> None:
    """Write what the streams did since `start_timeline`, a line each: stream, begin, end, bytes, name.

    Args:
        path: File to write, as tab-separated values.

    Raises:
        OSError: It cannot be written.
    """
    if ctypes.CDLL(None).simulated_cuda_write_timeline(str(path).encode()):
        raise OSError(f"the timeline could not be written to {path}")
