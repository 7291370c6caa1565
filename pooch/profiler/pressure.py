"""Steps whose saved tensors leave the device: as many as a budget asks for, down to all of them.

Room is made between ops alone, and nothing is copied ahead of need, so that no copy runs beside an op that is timed.
What is computed is what plain training computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial

import torch

from ..executor.engines import make_engine
from ..executor.evictor import Evictor
from ..executor.live_bytes import CountedBytes, WalkedBytes
from ..executor.mode import following
from ..executor.silence import Silence
from ..executor.statistics import RunStats
from ..executor.step import Step
from ..torchtools import accelerators
from ..torchtools.cpu_allocator import counting_allocator
from ..torchtools.memory_trace import marker

EVERYTHING_STAYS, NOTHING_STAYS = 2**62, -(2**62)  # budgets in bytes, for which no byte has to be counted
COPY_BACK = "copy back"  # marks, in a profiler, what brings a value back and is no op of the step


class _BytesBetweenOps(WalkedBytes):
    """Live bytes as they are asked for between ops: no allocation asks for room."""

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self._count = count

    def now(self) -> int:
        """Live bytes."""
        return self._count()

    def recent(self) -> int:
        """Return more than any budget has, so that nothing is brought back ahead of need."""
        return EVERYTHING_STAYS

    def look(self) -> tuple[int, int]:
        """Live bytes now. Nothing tells how much higher they were."""
        return self._count(), 0


@contextmanager
def evicting(device: torch.device, budget_bytes: int, live_bytes: int = 0) -> Iterator[Evictor]:
    """Context manager with an evictor for the steps inside.

    On a CPU where the allocator cannot count, a budget is as good as none, and nothing stays.

    Args:
        device: The device.
        budget_bytes: What may be live on it, or `EVERYTHING_STAYS` or `NOTHING_STAYS`.
        live_bytes: What is live now. It does not matter for the latter two.

    Raises:
        TierError: If the tier cannot be set up.
    """
    with closing(make_engine(device)) as engine, _counting(device, budget_bytes, live_bytes) as count:
        budget_bytes = NOTHING_STAYS if count is None else budget_bytes
        evictor = Evictor(budget_bytes, engine, _BytesBetweenOps(count or _nobody_asks), device)
        evictor.silence = Silence(_say_nothing)  # that is for those who train under an evictor
        yield evictor


@contextmanager
def _counting(device: torch.device, budget_bytes: int, live_bytes: int) -> Iterator[Callable[[], int] | None]:
    """Context manager with a function that returns the live bytes, or None if that would take longer than most ops."""
    if budget_bytes in (EVERYTHING_STAYS, NOTHING_STAYS):
        yield _nobody_asks
        return
    if accelerators.has_streams(device):
        yield partial(accelerators.allocated_bytes, device)
        return
    allocator = counting_allocator()
    if isinstance(allocator, str):
        yield None
        return
    with closing(CountedBytes(allocator, reads_peak=False, live_now_bytes=live_bytes)) as counted:
        yield counted.now if counted.is_in_place else None


def _nobody_asks() -> int:
    return 0


def _say_nothing(text: str) -> None:
    """What is not governed does not matter to a profile."""


class _CopyingStep(Step):
    """A step of which nothing is recorded: it makes room where autograd saves a tensor, as no mode sees its ops."""

    def __init__(self, evictor: Evictor) -> None:
        super().__init__(evictor, replays=False, copies_ahead=False)

    def pack_plain(self, tensor: torch.Tensor) -> object:
        """Return what autograd holds in place of a tensor that it saves."""
        with torch._C._DisableTorchDispatch():  # a mode that watches the step must not see copies
            self.evictor.look(0)
        return super().pack_plain(tensor)

    def unpack_plain(self, packed: object) -> torch.Tensor:
        """Return the tensor that autograd reads."""
        with marker(COPY_BACK):
            return super().unpack_plain(packed)


@contextmanager
def steps_under(evictor: Evictor) -> Iterator[None]:
    """Context manager in which saved tensors leave as the evictor has them, in steps of which nothing is recorded."""
    evictor.begin_step(RunStats())
    with following(_CopyingStep(evictor)):
        yield


@contextmanager
def saved_tensors_away(device: torch.device) -> Iterator[None]:
    """Context manager in which all saved tensors leave the device, except what the program holds."""
    with evicting(device, NOTHING_STAYS) as evictor, steps_under(evictor):
        yield
