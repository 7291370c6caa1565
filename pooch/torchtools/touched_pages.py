"""Having the system give a mapping its pages: by several threads at once, from the memory next to a device."""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
_MOST_THREADS = 8  # beyond that they wait for one another in the kernel
_LEAST_BYTES = 32 * 2**20  # for each thread


def touch_pages(address: int, size_bytes: int, cores: frozenset[int] = frozenset()) -> bool:
    """Touches all pages of a mapping for writing, and returns whether that went well; if not, some may be there.

    A page is cleared when it is touched first. Whatever locks pages touches them in one thread, one by one: a virtual
    machine with an H100 locked 512 MiB in 218 ms, so a tier of 16 GiB takes 7 s, in the first step that swaps.

    Args:
        address: Where the mapping begins: at a page.
        size_bytes: Its size.
        cores: Where the threads run, as far as this process may run there. A page comes from the memory of the NUMA
            node whose core touches it first. Empty: anywhere.
    """
    allowed = os.sched_getaffinity(0)
    cores = (cores & allowed) or frozenset(allowed)
    count = max(1, min(_MOST_THREADS, len(cores), size_bytes // _LEAST_BYTES))
    each_bytes = -(-size_bytes // count // mmap.PAGESIZE) * mmap.PAGESIZE
    spans = [(start, min(each_bytes, size_bytes - start)) for start in range(0, size_bytes, each_bytes)]
    with ThreadPoolExecutor(len(spans), "pooch-pages", _run_on, (cores,)) as threads:
        return all(threads.map(lambda span: _is_touched(address + span[0], span[1]), spans))


def _run_on(cores: frozenset[int]) -> None:
    """Has the calling thread run on these cores alone."""
    with suppress(OSError):
        os.sched_setaffinity(0, cores)


def _is_touched(address: int, size_bytes: int) -> bool:
    advise = ctypes.CDLL(None).madvise  # it runs without the interpreter's lock
    return bool(advise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE) == 0)
