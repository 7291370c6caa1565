"""What the C library does with freed memory, in processes of their own: its settings cannot be taken back."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pooch
from pooch.torchtools import malloc
from tests.children import child_environment

BLOCKS = """
import ctypes
import resource
import sys
import torch
import pooch
from pooch.torchtools.malloc import trim_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(16 * 2**20)  # 64 MiB, above the largest size that glibc keeps by itself
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() // 2**20

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 2**20

if sys.argv[1] != "plain":
    assert pooch.keep_freed_memory()
if sys.argv[1] == "returned":
    assert pooch.return_freed_memory()
torch.ones(128 * 2**20)  # room for all of the blocks: glibc cannot give a freed block to an equal request
found = faults()
held = resident_mib()
trim_freed_memory()
print(found, held - resident_mib())
"""


@pytest.mark.parametrize(("way", "is_kept"), [("plain", False), ("kept", True), ("returned", False)])
def test_kept_memory_is_used_again_without_page_faults(way: str, is_kept: bool) -> None:
    command = [sys.executable, "-c", BLOCKS, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    assert done.returncode == 0, done.stderr
    faulted_mib, returned_mib = map(int, done.stdout.split())
    assert (faulted_mib < 1) is is_kept  # huge pages make faults fewer, but never that few
    assert (returned_mib >= 500) is is_kept


SMALL = """
import resource
import sys
for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):
    resource.setrlimit(kind, (resource.getrlimit(kind)[1],) * 2)  # nothing is kept where memory is limited
import torch
from pooch.executor.engines.cpu import CpuEngine
from pooch.ground.process_limits import is_limited
from pooch.torchtools.malloc import _foreign

def heap_bytes():
    sizes = [line.split() for line in open("/proc/self/maps") if line.endswith("[heap]\\n")]
    return sum(int(end, 16) - int(start, 16) for start, end in (each[0].split("-") for each in sizes))

def blocks(mib):
    return [torch.ones(2**14) for _ in range(16 * mib)]  # of which glibc returns what is at the end

def returned_mib(mib):
    taken = blocks(mib)
    full = heap_bytes()
    taken.clear()
    return (full - heap_bytes()) // 2**20

assert not is_limited() and _foreign() is None, (is_limited(), _foreign())
holes, before = [], heap_bytes()
while heap_bytes() < before + 2**20:  # imports left them: what is taken from here on lies at the end
    holes += blocks(1)
if sys.argv[2] == "with a hole":
    torch.ones(5 * 2**20)  # glibc keeps 40 MiB at the end from here on
    below = blocks(40)
    above = torch.ones(2**14)
    below.clear()  # which serves a request for 32 MiB
if sys.argv[1] == "governed":
    CpuEngine()
print(*(returned_mib(42 if sys.argv[2] == "small" else 92) for _ in range(8)))
"""


# A small block that glibc keeps for itself can lie at the end of the heap, which it then does not return.
KEEPS_NO_SMALL_BLOCKS = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"


@pytest.mark.parametrize("way", ["plain", "governed"])
@pytest.mark.parametrize("heap", ["small", "with a hole"])
def test_what_governed_steps_free_in_small_blocks_is_kept_for_the_next_ones(way: str, heap: str) -> None:
    """Each MiB that is returned takes 256 page faults when it is taken again."""
    command = [sys.executable, "-c", SMALL, way, heap]
    environment = child_environment(GLIBC_TUNABLES=KEEPS_NO_SMALL_BLOCKS)
    for setting in [name for name in environment if name.startswith("MALLOC_")]:
        del environment[setting]  # glibc's thresholds stay as they are where any of them is set
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    returned_mib = list(map(int, done.stdout.split()))
    assert returned_mib == [0] * 8 if way == "governed" else min(returned_mib) >= 39, returned_mib


def test_where_it_cannot_be_done_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc, "is_limited", lambda: True)
    with pytest.warns(UserWarning, match="limited") as told:
        assert not pooch.keep_freed_memory()
    monkeypatch.setattr(malloc, "is_limited", lambda: False)
    monkeypatch.setattr(malloc, "_foreign", lambda: "malloc is that of libjemalloc.so.2, not glibc's")
    for ask in (pooch.keep_freed_memory, pooch.return_freed_memory):
        with pytest.warns(UserWarning, match="jemalloc") as told_again:
            assert not ask()
    assert all("\n" not in str(each.message) for each in (*told, *told_again))


FOREIGN = """
#define _GNU_SOURCE
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
static char *next;
static void *taken(size_t alignment, size_t size) {
  int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (next == NULL) next = mmap(NULL, 1ul << 36, PROT_READ | PROT_WRITE, kind, -1, 0);
  char *place = (char *)(((size_t)next + 16 + alignment - 1) / alignment * alignment);
  next = place + size;
  ((size_t *)place)[-1] = size;
  return place;
}
void *malloc(size_t size) { return taken(16, size); }
void *calloc(size_t count, size_t size) { return taken(16, count * size); }
void *realloc(void *old, size_t size) {
  void *place = taken(16, size);
  size_t before = old == NULL ? 0 : ((size_t *)old)[-1];
  return memcpy(place, old, before < size ? before : size);
}
int posix_memalign(void **place, size_t alignment, size_t size) { return *place = taken(alignment, size), 0; }
void *aligned_alloc(size_t alignment, size_t size) { return taken(alignment, size); }
void free(void *place) {}
"""

FORWARDING = """
#include <stddef.h>
void *__libc_malloc(size_t); void *malloc(size_t size) { return __libc_malloc(size); }
"""

TOLD = "from pooch.torchtools.malloc import _foreign; print(_foreign())"


@pytest.mark.parametrize(("source", "is_foreign"), [(FOREIGN, True), (FORWARDING, False)])
def test_another_malloc_is_recognised(source: str, is_foreign: bool, tmp_path: Path) -> None:
    file, library = tmp_path / "other.c", tmp_path / "libother.so"
    file.write_text(source)
    if subprocess.run(["cc", "-O1", "-fno-builtin", "-shared", "-fPIC", "-o", library, file], check=False).returncode:
        pytest.skip("there is no C compiler")
    environment = child_environment(LD_PRELOAD=str(library), OMP_NUM_THREADS="1")
    command = [sys.executable, "-c", TOLD]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    told = done.stdout.strip()
    assert (told.startswith("malloc is that of ") and told.endswith(", not glibc's")) is is_foreign
    assert is_foreign or told == "None"


def test_glibc_is_recognised_where_the_executable_has_the_address_of_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in executables that are not position-independent, which Debian's Python is."""
    files = iter(("python3", "libc.so.6"))
    monkeypatch.setattr(malloc, "_file_of", lambda *_: next(files))
    assert malloc._foreign() is None


def test_glibc_is_recognised_without_wide_counts() -> None:
    class Older:
        """What glibc before 2.33 has."""

        def __init__(self) -> None:
            library = ctypes.CDLL(None)
            self.malloc, self.free, self.mallinfo = library.malloc, library.free, library.mallinfo

    library: Any = Older()
    assert malloc._comes_from_its_heap(library)
    library.malloc = lambda _: 0
    assert not malloc._comes_from_its_heap(library)
