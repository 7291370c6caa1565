"""All pages of a mapping are there after they were touched, and not before."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from pooch.torchtools.touched_pages import touch_pages

MIB = 2**20


def mapped(size_bytes: int) -> tuple[mmap.mmap, torch.Tensor]:
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def resident_bytes(address: int) -> int:
    """What the system has given to the mapping at an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(f"{address:x}-"))
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))


@pytest.mark.parametrize("size_bytes", [1, mmap.PAGESIZE, 3 * MIB + 5, 97 * MIB + 4097])
@pytest.mark.parametrize("cores", [1, 3, 64])
def test_all_pages_are_there(size_bytes: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    _, contents = mapped(size_bytes)
    assert resident_bytes(contents.data_ptr()) == 0
    assert touch_pages(contents.data_ptr(), size_bytes)
    assert resident_bytes(contents.data_ptr()) == -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert contents.count_nonzero() == 0


def test_what_the_kernel_refuses_is_no_error() -> None:
    _, contents = mapped(mmap.PAGESIZE)
    assert not touch_pages(contents.data_ptr() + 1, mmap.PAGESIZE)  # no page begins there
