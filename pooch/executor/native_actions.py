"""What the native watch needs to run the actions of a planned step.

It works on the same values, sets and counters as `planned_values` and `plan_guide`, under the same lock. What it cannot
do at a slot, to a value or in a thread is left to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..ground.errors import PlanMismatch
from ..machine import CopySpeed, Level, Store, Value, Witness
from ..machine.lock import StepLock
from ..torchtools import watch
from ..torchtools.checksums import checksum_with
from ..torchtools.moving_memory import MOVING
from .engines.cpu import CpuArena
from .engines.health import TierHealth
from .leaving import FixedPlace
from .owner import ValueOwner
from .statistics import RunStats
from .step import Step
from .verification import Counts


@dataclass(frozen=True, slots=True)
class ActionParts:
    """What native actions work on. The names are those that `watch/moves.h` asks for.

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
        held_back: Values that were copied, and that the program may still change.
        to_drop: Numbers of values that replays will read, whether autograd still holds them or not.
        looked_at: Returns the numbers of the values that are looked at before their bytes are freed. Asked once.
        sampled: Returns which recomputed values are compared by a sample at most, and whether they are. Asked once.
        tainted: Numbers of values that the program may have changed through an address, and what is made of them.
        witness: The type of what a replay is compared with.
        sample: The level of one that is a sample.
        checksum: Returns the checksum of a storage, given whether that of a sample is enough, which is a native one.
        plan: The number of the plan.
        checked: Counts comparisons.
        act: Runs one action of a slot, and returns whether the step is still on its path.
        put: Takes what a replay gave for a value, and compares it.
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
    held_back: dict[int, Value]
    to_drop: set[int]
    looked_at: Callable[[], set[int]]
    sampled: Callable[[], dict[int, bool]]
    tainted: set[int]
    witness: type[Witness]
    sample: Level
    checksum: Callable[[torch.UntypedStorage, bool], int]
    plan: int
    checked: Counts
    act: Callable[[int, int], bool]
    put: Callable[[int, torch.UntypedStorage], None]
    learn: Callable[..., None]
    end_copy_out: Callable[[Value], None]
    moving: Any
    profiler: Any


def native_actions(step: Step) -> Any:
    """Return what runs the actions of a step natively, or None if it has no plan, or its values are not on a CPU.

    Where allocations do not ask for room, it is made at each read.
    """
    module, guide = watch.LIBRARY.get(), step.guide
    if module is None or guide is None or not guide.table.acts_natively:
        return None
    values, arena, table = guide.values, guide.values.arena, guide.table
    if type(arena) is not CpuArena or not values.asks:
        return None
    lock, store, leaving = values.lock, values.store, values.leaving
    parts = ActionParts(
        values.planned, lock, lock._lock.acquire, lock._lock.release, lock.end, values.stats, step.owner, arena,
        FixedPlace, values.health, store, guide.acted, guide.done, guide.replays_ahead, values.held_back,
        values.to_drop, partial(leaving.looked_at, table.swapped), partial(leaving.sampled, table.recomputed),
        leaving.tainted, Witness, Level.SAMPLE, partial(checksum_with, module.sample_checksum), table.copies.number,
        leaving.verification.counts, partial(_act_once, weakref.ref(step)), values.put,
        partial(_learned, store.speed), values.end_copy_out, MOVING, torch.autograd.profiler,
    )  # fmt: skip
    return module.Moves(step.cursor, parts)


def _act_once(step: Callable[[], Step | None], slot: int, index: int) -> bool:
    """Run one action of a slot, of which others are run natively, and return whether to go on with those after it.

    Args:
        step: Returns the step: autograd must not hold it by its moves.
        slot: The slot.
        index: The place of the action among those of the slot.
    """
    here = step()
    if here is None or here.guide is None:
        return False
    try:
        with torch._C._DisableTorchDispatch():
            here.guide.run(here.guide.table.actions[slot][index])
    except PlanMismatch as error:
        here.cannot_act(error)
        return False
    return True


def _learned(speed: CopySpeed, outwards: bool, copies: int, size_bytes: int, copy_ms: float) -> None:
    (speed.out if outwards else speed.back).note(size_bytes, copy_ms, copies)
