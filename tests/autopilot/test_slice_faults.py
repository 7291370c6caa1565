"""Each of five faults at each op of an optimizer's step in slices: no parameter is without its state afterwards."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pooch.executor.engines import cpu
from pooch.executor.engines.cpu import CpuTicket
from pooch.ground.errors import TierError
from pooch.torchtools import watch
from tests.autopilot.test_persistence import Slices, by_parameter, memory_of
from tests.executor.copiers import use_copier

pytestmark = [
    pytest.mark.skipif(watch.LIBRARY.get() is None, reason="nothing leaves without what watches natively"),
    pytest.mark.filterwarnings("ignore:the spill directory", "ignore:.*thread that copies has died"),
    pytest.mark.timeout(600),
]
LEAST_OPS = 20  # of a step in a few slices


class Interrupted(BaseException):
    pass


class Faulty:
    """The tier of a test, and what goes wrong with it from some op on.

    Attributes:
        is_full: Whether the disk takes nothing more.
        kills: Whether the thread that copies dies at the next copy.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_copier("Python", monkeypatch)
        self.is_full = self.kills = False
        write, run = os.pwrite, CpuTicket.run

        def pwrite(*args: Any) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "no space left on device")
            return write(*args)

        def runs(ticket: CpuTicket, buffer: Any) -> None:
            if self.kills:
                self.kills = False
                raise SystemExit
            run(ticket, buffer)

        monkeypatch.setattr(os, "pwrite", pwrite)
        monkeypatch.setattr(CpuTicket, "run", runs)
        monkeypatch.setattr(cpu, "LOOK_AGAIN_S", 0.01)
        monkeypatch.setattr(threading, "excepthook", lambda told: None)

    def mend(self) -> None:
        """Have nothing go wrong from now on."""
        self.is_full = self.kills = False

    def fill(self) -> None:
        """Have the disk take nothing more."""
        self.is_full = True

    def kill(self) -> None:
        """Have the thread die at the next copy."""
        self.kills = True


def _raises(error: type[BaseException], text: str) -> Callable[[Faulty], None]:
    def fault(_: Faulty) -> None:
        raise error(text)

    return fault


FAULTS: dict[str, Callable[[Faulty], None]] = {
    "interrupt": _raises(Interrupted, ""),
    "exception": _raises(ValueError, "no such luck"),
    "out of memory": _raises(
        RuntimeError, "DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
    ),
    "full disk": Faulty.fill,
    "dead copy thread": Faulty.kill,
}


class FaultAt(TorchDispatchMode):
    """Has something go wrong before an op, given its number, if there are so many."""

    def __init__(self, number: int, fault: Callable[[], None]) -> None:
        super().__init__()
        self._number, self._fault = number, fault
        self.has_come = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._number == 0:
            self.has_come = True
            self._fault()
        self._number -= 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_any_op_of_any_slice_loses_nothing(
    name: str, foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = Faulty(monkeypatch)
    slices = Slices(foreach)
    ended = undone = 0
    with slices.held() as (model, optimizer, auto):
        for number in range(10_000):
            memory_of(auto).begin_step([model])  # what a copy of has failed stays until then
            slices.begin(model, optimizer, auto)
            mode = FaultAt(number, lambda: FAULTS[name](faulty))
            try:
                with mode:
                    optimizer.step()
            except (Interrupted, ValueError, RuntimeError, TierError):
                ended += 1
            faulty.mend()
            found = by_parameter(model, optimizer)
            assert slices.are_whole(found), f"op {number}"
            undone += found != slices.after
            torch.save((model.state_dict(), optimizer.state_dict()), io.BytesIO())
            if not mode.has_come:
                break
        assert found == slices.after
        assert number > LEAST_OPS
        assert (ended == number) is (name in ("interrupt", "exception", "out of memory"))
        assert undone > 0 or name in ("full disk", "dead copy thread")  # where the step goes on
