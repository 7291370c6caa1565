"""What the native watch needs to read and to let go of the values of a step without a plan.

It does so under the lock of the step, as long as a value is there and nothing is to be brought back after it. All else
is left to `Step.read` and to the pressure guide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..machine import Store, Value
from ..machine.lock import StepLock
from ..machine.pressure import REACH
from ..torchtools import watch
from .evictor import Evictor
from .owner import ValueOwner
from .step import Step


@dataclass(frozen=True, slots=True)
class ReadParts:
    """What native reads work on. The names are those that `watch/moves.h` asks for.

    Attributes:
        lock: The lock of the step.
        acquire: Takes it.
        release: Gives it back.
        owner: What the machine asks about the values.
        store: Says whether the budget grows with the step, which has to know what ends.
        saved: The values that autograd has saved, by number.
        forget: Has a value leave no more.
        pressure: Is told of the position of the backward pass.
        copied_at: When the values that the tier has were saved, the first one first.
        reading: Values that are on their way back ahead of need.
    """

    lock: StepLock
    acquire: Callable[..., bool]
    release: Callable[[], None]
    owner: ValueOwner
    store: Store
    saved: dict[int, Value]
    forget: Callable[[Value], None]
    pressure: Evictor
    copied_at: list[int]
    reading: dict[Value, None]


def native_reads(step: Step) -> Any:
    """Return what reads the values of a step natively, or None if it has a plan, or its values are not on a CPU.

    Where allocations do not ask for room, it is made at each read.
    """
    module, evictor = watch.LIBRARY.get(), step.evictor
    if module is None or step.guide is not None or evictor.device.type != "cpu" or not evictor.live.asks:
        return None
    lock = step.lock
    parts = ReadParts(
        lock, lock._lock.acquire, lock._lock.release, step.owner, evictor.store, step.owner.saved, evictor.forget,
        evictor, evictor._away.copied_at, evictor._reading,
    )  # fmt: skip
    return module.Reads(step.cursor, Value, parts, REACH)
