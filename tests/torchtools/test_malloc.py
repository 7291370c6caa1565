"""What the C library does with freed memory, in processes of their own: its settings cannot be taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
import torch
from pooch.executor.engines.cpu import CpuEngine

def faulted_mib(rounds):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        tensors = [torch.ones(2**14) for _ in range(640)]  # 40 MiB in all, of which glibc returns what is at the end
        tensors.clear()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() // 2**20

if sys.argv[1] == "governed":
    CpuEngine()
faulted_mib(2)
print(faulted_mib(8))
"""


@pytest.mark.parametrize("way", ["plain", "governed"])
def test_what_governed_steps_free_in_small_blocks_is_used_again_without_page_faults(way: str) -> None:
    command = [sys.executable, "-c", SMALL, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 40) is (way == "governed")


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
#include <stddef.h>
void *__libc_malloc(size_t); void *malloc(size_t size) { return __libc_malloc(size); }
"""


def test_another_malloc_is_recognised(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(FOREIGN)
    built = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=False)
    if built.returncode:
        pytest.skip("there is no C compiler")
    code = "from pooch.torchtools.malloc import _foreign; print(_foreign())"
    for environment, told in (
        (child_environment(), "None"),
        (child_environment(LD_PRELOAD=str(library)), "malloc is that of libother.so, not glibc's"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, check=True
        )
        assert done.stdout.strip() == told
