"""What the native watch needs to move values of a planned step that are only copied and come back.

It works on the same values, sets and counters as `planned_values` and `plan_guide`, under the same lock. What else is
to be done at a slot, to a value or in a thread is left to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..machine import CopySpeed, Store, Value
from ..machine.lock import StepLock
from ..torchtools import watch
from ..torchtools.moving_memory import MOVING
from .engines.cpu import CpuArena
from .engines.health import TierHealth
from .leaving import FixedPlace
from .owner import ValueOwner
from .plan_guide import PlanGuide
from .statistics import RunStats


@dataclass(frozen=True, slots=True)
class SimpleMoves:
    """What such moves work on. The names are those that `watch/moves.h` asks for.

    Attributes:
        planned: The values that the plan moves, by number.
        lock: The lock of the step.
        acquire: Takes it.
        release: Gives it back.
        end: Reports the end of a handle to it.
        stats: Counters of the step.
        owner: What the machine asks about the values.
        arena: Where they are copied to.
        place: The type of room in it.
        health: What is wrong with it.
        store: Makes the moves that are not made natively.
        acted: Slots whose actions have begun.
        done: Slots whose actions are done.
        ahead: Slots with replays that are still to come, the next one last.
        pending: Values that leave as soon as the program has released them.
        held_back: Values that were copied, and that the program may still change.
        to_drop: Numbers of values that replays will read, whether autograd still holds them or not.
        looked_at: Returns the numbers of the values that are looked at before their bytes are freed. Asked once.
        learn: Takes into account how long some copies in one direction took.
        end_copy_out: Ends a copy that has failed.
        moving: Has a `depth` where no copy may be under way in the calling thread when it goes on.
        profiler: PyTorch's module: while it profiles, moves have names.
    """

    planned: dict[int, Value]
    lock: StepLock
    acquire: Callable[..., bool]
    release: Callable[[], None]
    end: Callable[[Value], None]
    stats: RunStats
    owner: ValueOwner
    arena: CpuArena
    place: type[FixedPlace]
    health: TierHealth
    store: Store
    acted: set[int]
    done: set[int]
    ahead: list[int]
    pending: dict[int, Value]
    held_back: dict[int, Value]
    to_drop: set[int]
    looked_at: Callable[[], set[int]]
    learn: Callable[..., None]
    end_copy_out: Callable[[Value], None]
    moving: Any
    profiler: Any


def native_moves(guide: PlanGuide | None, owner: ValueOwner, region: Any) -> Any:
    """Return what moves the simple values of a step natively, or None if there is none, or they are not on a CPU.

    Where allocations do not ask for room, it is made at each read.

    Args:
        guide: What a plan has the step do, or None.
        owner: What the machine asks about its values.
        region: Watches the step.
    """
    module = watch.LIBRARY.get()
    if module is None or guide is None or not guide.table.moves_simply:
        return None
    values, arena = guide.values, guide.values.arena
    if type(arena) is not CpuArena or not values.asks:
        return None
    lock, store = values.lock, values.store
    parts = SimpleMoves(
        values.planned, lock, lock._lock.acquire, lock._lock.release, lock.end, values.stats, owner, arena,
        FixedPlace, values.health, store, guide.acted, guide.done, guide.replays_ahead, values.leaving.pending,
        values.held_back, values.to_drop, partial(values.leaving.looked_at, guide.table.swapped),
        partial(_learned, store.speed), values.end_copy_out, MOVING, torch.autograd.profiler,
    )  # fmt: skip
    return module.Moves(region, parts)


def _learned(speed: CopySpeed, outwards: bool, copies: int, size_bytes: int, copy_ms: float) -> None:
    (speed.out if outwards else speed.back).note(size_bytes, copy_ms, copies)
