"""All pages of a mapping are there after they were touched, and not before."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pooch.torchtools import cuda_only
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


def test_only_cores_that_are_near_and_allowed_touch_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound.append(cores))
    _, contents = mapped(mmap.PAGESIZE)
    for near in ({1, 2, 7}, {7, 8}, set()):
        assert touch_pages(contents.data_ptr(), mmap.PAGESIZE, frozenset(near))
    assert bound == [{1, 2}, {0, 1, 2}, {0, 1, 2}]


def test_the_threads_of_the_program_stay_where_they_run() -> None:
    before, (_, contents) = os.sched_getaffinity(0), mapped(mmap.PAGESIZE)
    assert touch_pages(contents.data_ptr(), mmap.PAGESIZE, frozenset({min(before)}))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("told", "expected"), [("0-2,8\n", {0, 1, 2, 8}), ("5\n", {5}), ("\n", set()), ("words\n", set()), (None, set())]
)
def test_the_system_says_which_cores_are_near(
    told: str | None, expected: set[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    card = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x41, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(cuda_only, "_PCI_DEVICES", tmp_path)
    if told is not None:
        (tmp_path / "0000:41:00.0").mkdir()
        (tmp_path / "0000:41:00.0" / "local_cpulist").write_text(told)
    assert cuda_only.near_cores(torch.device("cuda", 0)) == expected
    assert cuda_only.near_cores(torch.device("cpu")) == frozenset()


def test_what_the_kernel_refuses_is_no_error() -> None:
    _, contents = mapped(mmap.PAGESIZE)
    assert not touch_pages(contents.data_ptr() + 1, mmap.PAGESIZE)  # no page begins there
