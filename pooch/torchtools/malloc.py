"""The C library's `malloc`, which serves PyTorch's CPU tensors, and what it does with freed memory.

glibc gives a large block its own mapping, which goes back to the system when the block is freed, and keeps small ones.
What is large starts at 128 KiB and rises to up to 32 MiB with the blocks that are freed. A fresh mapping costs a page
fault for each 4 KiB, and kept memory counts as the process's, so each of the functions here suits another case.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from functools import cache
from pathlib import Path

from ..ground.process_limits import is_limited

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # of glibc's mallopt
_LARGE_BLOCK_BYTES = 256 * 1024
_TRIM_BYTES, _MOST_MAPPINGS = 128 * 1024, 65536  # as glibc has them
_NEVER = 2**31 - 1
_LARGEST_KEPT_BYTES = 2**25 - 2**16  # the largest block by which glibc raises its thresholds, less what it adds
_MOST_BLOCKS = 8  # where the user's own settings are in force, none has a mapping of its own, or it changes nothing
_PROBE_BYTES = 2**26  # above the largest block whose end changes glibc's thresholds
_ATTEMPTS = 3  # other threads may take and free as much meanwhile
_COUNTED_MODULO = 2**32
_MAPPINGS, _MAPPED_BYTES, _ARENA_BYTES = 3, 4, 7  # places of `hblks`, `hblkhd` and `uordblks` in `struct mallinfo`
_KEEPING = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER))
_RETURNING = (
    (_M_MMAP_MAX, _MOST_MAPPINGS),
    (_M_TRIM_THRESHOLD, _TRIM_BYTES),
    (_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES),
)
_ONE_HEAP = ((_M_ARENA_MAX, 1),)  # a further thread's own heap would reserve 64 MiB of address space


def return_freed_memory() -> bool:
    """Have the C library return large blocks to the system as soon as they are freed, for the rest of the process.

    glibc otherwise keeps freed blocks of up to 32 MiB for later, in pieces that often do not fit the next tensor, and
    they count as the process's. With this, the resident size of a CPU training stays close to its live bytes. Each
    tensor of 256 KiB and more then takes a page fault for every 4 KiB. Pooch does this by itself where the memory of
    the process is limited (`ulimit -d`, `ulimit -v`).

    It changes no results, and nothing on a GPU. With another `malloc` than glibc's it does nothing, and a warning says
    so.

    Returns:
        Whether freed memory is returned from now on.
    """
    return _set("returned", _foreign(), _RETURNING)


@cache
def return_large_blocks() -> None:
    """Does what `return_freed_memory` does, where it can be done, without a word: a limit leaves Pooch no choice."""
    if _foreign() is None:
        _set("returned", None, _RETURNING + _ONE_HEAP)


@cache
def raise_thresholds() -> None:
    """Has glibc keep what it keeps in each process that has ever freed a tensor of 32 MiB, unless memory is limited.

    What a plan frees in the middle of a step often lies at the end of the heap. Where all tensors are small, glibc
    would return it to the system each time, and the step take page faults for it that a plain step does not take.
    """
    if is_limited() or _foreign() is not None:
        return
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    blocks: list[ctypes.c_void_p] = []  # never written: they take no memory
    for _ in range(_MOST_BLOCKS):  # only one with a mapping of its own raises them, and a hole in the heap may serve it
        before = _mappings(library)
        blocks.append(ctypes.c_void_p(library.malloc(ctypes.c_size_t(_LARGEST_KEPT_BYTES))))
        if _mappings(library) != before:
            break
    for block in blocks:
        library.free(block)


def trim_freed_memory() -> None:
    """Returns the memory to the system that is free now (`malloc_trim`), in all threads' arenas."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for the next allocations, for the rest of the process.

    glibc otherwise returns large freed blocks to the system, and a CPU training step then takes a page fault for every
    4 KiB of the same memory again. With this, plain training and training under a plan have a small part of these
    faults, and are faster to the degree that faults took their time. The process keeps the highest amount of memory
    that it ever had, which may be a little more than otherwise, since no block has a mapping of its own.

    It changes no results, and nothing on a GPU. Where the memory of the process is limited (`ulimit -d`, `ulimit -v`)
    and with another `malloc` than glibc's, it does nothing, and a warning says so.

    Returns:
        Whether freed memory is kept from now on.
    """
    reason = "the memory of this process is limited" if is_limited() else _foreign()
    return _set("kept", reason, _KEEPING)


def _set(done: str, reason: str | None, settings: tuple[tuple[int, int], ...]) -> bool:
    if reason is None and not all(ctypes.CDLL(None).mallopt(name, value) for name, value in settings):
        reason = "glibc refuses the settings"
    if reason is not None:
        warnings.warn(f"freed memory is not {done}: {reason}", stacklevel=3)
    return reason is None


class _Place(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _Counts(ctypes.Structure):
    """`struct mallinfo2` of mallinfo(3)."""

    _fields_ = (("figures", ctypes.c_size_t * 10),)


class _NarrowCounts(ctypes.Structure):
    """`struct mallinfo`, which is all that glibc before 2.33 has. Its figures wrap around."""

    _fields_ = (("figures", ctypes.c_uint * 10),)


def _foreign() -> str | None:
    """Why the `malloc` of this process is not glibc's, or None if it is.

    An executable that is not position-independent, as Debian's Python, has the address of every C function that it
    calls in itself, wherever the function is. So where the address is not in glibc, its heap is asked.
    """
    try:
        library = ctypes.CDLL(None)
        found, own = (_file_of(library, function) for function in (library.malloc, library.gnu_get_libc_version))
        is_own = found == own or _comes_from_its_heap(library)
    except (OSError, AttributeError):
        return "the C library is not glibc"
    return None if is_own else f"malloc is that of {found}, not glibc's"


def _comes_from_its_heap(library: ctypes.CDLL) -> bool:
    """Whether glibc counts a block that `malloc` gives. It is never written, and so takes no memory."""
    library.malloc.restype = ctypes.c_void_p
    for _ in range(_ATTEMPTS):
        before = _counted_bytes(library)
        block = ctypes.c_void_p(library.malloc(ctypes.c_size_t(_PROBE_BYTES)))
        grown_bytes = (_counted_bytes(library) - before) % _COUNTED_MODULO
        library.free(block)
        if block and abs(grown_bytes - _PROBE_BYTES) < _PROBE_BYTES // 2:
            return True
    return False


def _counted_bytes(library: ctypes.CDLL) -> int:
    """What glibc's heap has given out, in its arenas and in mappings of their own, as far as `mallinfo` can count."""
    figures = _figures(library)
    return (figures[_MAPPED_BYTES] + figures[_ARENA_BYTES]) % _COUNTED_MODULO


def _mappings(library: ctypes.CDLL) -> int:
    """How many blocks have mappings of their own."""
    return _figures(library)[_MAPPINGS]


def _figures(library: ctypes.CDLL) -> list[int]:
    is_wide = hasattr(library, "mallinfo2")
    count = library.mallinfo2 if is_wide else library.mallinfo
    count.restype = _Counts if is_wide else _NarrowCounts
    return list(count().figures)


def _file_of(library: ctypes.CDLL, function: object) -> str:
    place = _Place()
    library.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place))  # type: ignore[arg-type]
    return Path((place.file or b"").decode()).name
