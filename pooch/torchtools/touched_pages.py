"""Having the system give a mapping its pages, by several threads at once."""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

_MADV_POPULATE_WRITE = 23  # Linux 5.14 and later
_MOST_THREADS = 8  # beyond that they wait for one another in the kernel
_LEAST_BYTES = 32 * 2**20  # for each thread


def touch_pages(address: int, size_bytes: int) -> bool:
    """Touches all pages of a mapping for writing, and returns whether that went well; if not, some may be there.

    A page is cleared when it is touched first. Whatever locks pages touches them in one thread, one by one: a virtual
    machine with an H100 locked 512 MiB in 218 ms, so a tier of 16 GiB takes 7 s, in the first step that swaps.

    Args:
        address: Where the mapping begins: at a page.
        size_bytes: Its size.
    """
    count = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), size_bytes // _LEAST_BYTES))
    each_bytes = -(-size_bytes // count // mmap.PAGESIZE) * mmap.PAGESIZE
    spans = [(start, min(each_bytes, size_bytes - start)) for start in range(0, size_bytes, each_bytes)]
    with ThreadPoolExecutor(len(spans), thread_name_prefix="pooch-pages") as threads:
        return all(threads.map(lambda span: _is_touched(address + span[0], span[1]), spans))


def _is_touched(address: int, size_bytes: int) -> bool:
    advise = ctypes.CDLL(None).madvise  # it runs without the interpreter's lock
    return bool(advise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE) == 0)
