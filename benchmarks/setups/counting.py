"""The live bytes of this process's tensors on the CPU, counted below PyTorch and without Pooch.

`counting.cpp`, preloaded, counts what PyTorch's CPU allocator takes from the C library. It is built on first use.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from pooch.ground.native import BuildError, built_library

SOURCE = Path(__file__).with_name("counting.cpp")


def preloading(environment: dict[str, str]) -> dict[str, str]:
    """An environment in which a child process can count.

    Raises:
        RuntimeError: there is no C++ compiler.
    """
    try:
        library = built_library("setups_counting", SOURCE, compile_flags=["-pthread"])
    except BuildError as error:
        raise RuntimeError(f"counting live bytes needs a C++ compiler: {error}") from None
    return {**environment, "LD_PRELOAD": f"{library} {environment.get('LD_PRELOAD', '')}".strip()}


class LiveBytes:
    """The counter of this process, which has to be started with `preloading`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        try:
            watch = self._library.counting_watch
        except AttributeError:
            raise RuntimeError("the counter is not preloaded: start the process with `preloading`") from None
        self._library.counting_live_bytes.restype = self._library.counting_peak_bytes.restype = ctypes.c_int64
        watch(*(ctypes.c_size_t(address) for address in _code_of("libc10.so")))

    @property
    def live_bytes(self) -> int:
        """Of the blocks that were allocated since the counter was made."""
        return int(self._library.counting_live_bytes())

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes since `begin_peak`."""
        return int(self._library.counting_peak_bytes())

    def begin_peak(self) -> None:
        self._library.counting_begin_peak()


def _code_of(library: str) -> tuple[int, int]:
    """First and last address of a loaded library's code."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_, path = line.split()
        if "x" in permissions and Path(path).name == library:
            first, last = addresses.split("-")
            return int(first, 16), int(last, 16)
    raise RuntimeError(f"{library} is not loaded")
