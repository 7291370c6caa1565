"""Faults of a machine, each put into the place where it would really be."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pooch.api.doctor import basics, tier
from pooch.executor.engines import cpu, spill_file
from pooch.executor.engines.cpu import CpuArena
from pooch.torchtools import accelerators, memory_meter, watch
from tests.executor.test_tier_faults import changed_on_disk

Put = Callable[[pytest.MonkeyPatch, Path], None]
MISSING = "/nowhere/at/all"
SLOW_LINK_BYTES_PER_MS = 1.0  # no disk is as slow as that, whatever else it does


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: what it is.
        within: the check that looks for it.
        finding: the finding that has to name it.
        says: a part of what is told.
        put: puts it in.
    """

    name: str
    within: str
    finding: str
    says: str
    put: Put


def _generator_is_not_set(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(accelerators, "set_random_state", lambda device, state: None)


def _copies_are_not_awaited(patch: pytest.MonkeyPatch, folder: Path) -> None:
    class Late:
        """Waits for nothing. The copy begins once somebody asks whether it has ended: no sooner on any machine."""

        def __init__(self, *arguments: Any) -> None:
            self._arguments, self._ticket, self.error = arguments, None, None

        def is_done(self) -> bool:
            if self._ticket is None:
                self._ticket = real(*self._arguments)
            return bool(self._ticket.is_done())

        def wait(self) -> float:
            return 0.0

    real = CpuArena.copy_out
    patch.setattr(CpuArena, "copy_out", lambda *arguments: Late(*arguments))


def _link_is_slow(patch: pytest.MonkeyPatch, folder: Path) -> None:
    real = tier.measure_link
    slow = {"in_bytes_per_ms": SLOW_LINK_BYTES_PER_MS}
    patch.setattr(tier, "measure_link", lambda *given, **more: replace(real(*given, **more), **slow))


def _disk_is_full(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(spill_file.os, "posix_fallocate", full)


def _directory_is_missing(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("POOCH_SPILL_DIRECTORY", MISSING)


def _directory_is_not_writable(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Root may write anywhere, so the system's answer is put in its place."""

    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    patch.setattr("pooch.torchtools.spill_directory.os.open", refused)
    patch.setattr("pooch.torchtools.spill_directory.tempfile.mkstemp", refused)


def _no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("CXX", "no-such-compiler")


def _native_part_does_not_compile(patch: pytest.MonkeyPatch, folder: Path) -> None:
    broken = folder / "broken.cpp"
    broken.write_text("this is no program;\n")
    patch.setattr(watch, "SOURCE", broken)
    patch.setattr(watch, "HEADERS", ())


def _operator_varies(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Erf adds numbers that nobody can repeat."""
    library = torch.library.Library("aten", "IMPL")
    drawn = torch.Generator().manual_seed(0)

    def varying(values: torch.Tensor) -> torch.Tensor:
        return values + torch.rand(values.shape, generator=drawn)

    library.impl("erf", varying, "CPU", allow_override=True)
    patch.setattr(basics, "catalogue", _WithLibrary(library, basics.catalogue))


class _WithLibrary:
    """A function that holds a library: once it is put back, PyTorch's own kernels are, too."""

    def __init__(self, library: torch.library.Library, function: Any) -> None:
        self._library, self._function = library, function

    def __call__(self, device: torch.device) -> Any:
        return self._function(device)

    def __del__(self) -> None:
        self._library._destroy()


def _copy_gives_other_bytes(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Behind the checksums: the bytes change once they are back in memory."""
    real = CpuArena.copy_in

    def flipping(arena: CpuArena, storage: torch.UntypedStorage, offset_bytes: int) -> Any:
        ticket = real(arena, storage, offset_bytes)
        ticket.wait()
        storage[3] ^= 0x40  # the exponent of the first number, so that it shows in what is computed from it
        return ticket

    patch.setattr(CpuArena, "copy_in", flipping)


def _disk_gives_other_bytes(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(cpu.copier.LIBRARY, "loaded", None)  # a thread of Python writes through this function
    patch.setattr(cpu.copier.LIBRARY, "_is_known", True)
    changed_on_disk(patch)


def _counter_is_wrong(patch: pytest.MonkeyPatch, folder: Path) -> None:
    real = memory_meter.live_bytes
    patch.setattr(memory_meter, "live_bytes", lambda device: real(device) + 4096)


def _clock_is_wrong(patch: pytest.MonkeyPatch, folder: Path) -> None:
    real = time.perf_counter
    patch.setattr(basics.time, "perf_counter", lambda: 3 * real())


FAULTS = (
    Fault("wrong generator state", "random numbers", "random numbers", "does not go back", _generator_is_not_set),
    Fault("a copy that is not awaited", "copies", "order of copies", "does not wait", _copies_are_not_awaited),
    Fault("a slow link", "link", "link", "less than", _link_is_slow),
    Fault("a full disk", "spill directory", "spill directory", "is full", _disk_is_full),
    Fault("a missing directory", "spill directory", "spill directory", "is missing", _directory_is_missing),
    Fault(
        "a directory of others", "spill directory", "spill directory", "may not be written", _directory_is_not_writable
    ),
    Fault("no compiler", "compiler", "compiler", "there is no no-such-compiler", _no_compiler),
    Fault(
        "a native part that does not compile",
        "native parts",
        "native part: watching steps",
        "failed",
        _native_part_does_not_compile,
    ),
    Fault("an operator that varies", "operators", "operators", "aten::erf differs from run to run,", _operator_varies),
    Fault("other bytes in memory", "copies", "copied bytes", "other bytes", _copy_gives_other_bytes),
    Fault("other bytes on the disk", "copies", "copied bytes", "other bytes", _disk_gives_other_bytes),
    Fault("a wrong memory counter", "memory counters", "memory counters", "were measured as", _counter_is_wrong),
    Fault("a wrong clock", "clocks", "clocks", "time.perf_counter", _clock_is_wrong),
)
