"""Peak counters of a device that two may reset: the user's program, and Pooch, which measures steps with them.

The caching allocator has one set of them. Whoever resets them takes note of the peaks for the other first, and what
each is told is the highest of what was noted for it and what the allocator counts since. So `max_memory_allocated` of a
program is what it would be if nobody else reset anything, and a step is measured whenever the program resets.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

Counters = dict[str, Any]

# What PyTorch's own functions in Python call: they look these up each time. All readers name counters alike.
READER = "_accelerator_getDeviceStats"
RESET = "_accelerator_resetPeakStats"
_READERS = (READER, "_cuda_memoryStats")
_RESETS = (RESET, "_cuda_resetPeakMemoryStats")


class PeakCounters:
    """Both sides' peaks. PyTorch's functions tell the user's from the first reset of Pooch's on.

    Args:
        module: Holds PyTorch's functions.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._lock = threading.RLock()
        self._original: dict[str, Callable[..., Any]] = {}
        self._users: dict[int, Counters] = {}
        self._ours: dict[int, Counters] = {}

    def read(self, device: int) -> Counters:
        """Return the counters, with peaks since Pooch's last reset."""
        with self._lock:
            return _highest(self._raw(READER)(device), self._ours.get(device))

    def reset(self, device: int) -> None:
        """Begin to count Pooch's peaks anew. Those of the user go on."""
        with self._lock:
            self._install()
            self._users[device] = _highest(self._raw(READER)(device), self._users.get(device))
            self._ours.pop(device, None)
            self._raw(RESET)(device)

    def _raw(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = self._original.get(name) or getattr(self._module, name)
        return found

    def _install(self) -> None:
        if self._original:
            return
        for names, make in ((_READERS, self._reading), (_RESETS, self._resetting)):
            for name in names:
                original = getattr(self._module, name, None)
                if original is not None:
                    self._original[name] = original
                    setattr(self._module, name, make(original))

    def _reading(self, original: Callable[[int], Counters]) -> Callable[[int], Counters]:
        def read(device: int) -> Counters:
            with self._lock:
                return _highest(original(device), self._users.get(device))

        return read

    def _resetting(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def reset(device: int) -> None:
            with self._lock:
                self._ours[device] = _highest(self._raw(READER)(device), self._ours.get(device))
                self._users.pop(device, None)
                original(device)

        return reset


def _highest(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> Counters:
    """Counters as they are now, with each peak at least what it was before."""
    if before is None:
        return dict(now)
    found: Counters = {}
    for name, each in now.items():
        earlier = before.get(name)
        if isinstance(each, Mapping):
            found[name] = _highest(each, earlier)
        else:
            found[name] = max(each, earlier or 0) if name == "peak" else each
    return found


def flattened(counters: Mapping[str, Any], prefix: str = "") -> dict[str, int]:
    """Counters by names such as "allocated_bytes.all.peak"."""
    found: dict[str, int] = {}
    for name, each in counters.items():
        if isinstance(each, Mapping):
            found |= flattened(each, f"{prefix}{name}.")
        else:
            found[prefix + name] = each
    return found


PEAKS = PeakCounters(torch._C)
