"""The live bytes of this process's tensors on the CPU, counted below PyTorch and without Pooch.

`counting.c`, preloaded, counts what PyTorch's CPU allocator takes from the C library. It is built on first use.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("counting.c")
LIBRARY = Path("build/setups/counting.so")


def built_library() -> Path:
    """The compiled counter, built again where its source is newer.

    Raises:
        RuntimeError: there is no C compiler.
    """
    library = LIBRARY.resolve()
    if library.exists() and library.stat().st_mtime >= SOURCE.stat().st_mtime:
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    beside = library.with_suffix(f".{os.getpid()}")
    command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(beside), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError("counting live bytes needs a C compiler: install one that answers to `cc`") from None
    beside.replace(library)
    return library


def preloading(environment: dict[str, str]) -> dict[str, str]:
    """An environment in which a child process can count."""
    earlier = environment.get("LD_PRELOAD", "")
    return {**environment, "LD_PRELOAD": f"{built_library()} {earlier}".strip()}


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
