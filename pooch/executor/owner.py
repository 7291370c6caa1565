"""What the machine asks of a step: room in the tier for its values, and how each is made again."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..machine import Call, Level, Recipes, Value
from ..machine.recipes import Resolve
from ..machine.values import Place
from ..torchtools.operators import has_undefined_bytes, operator_facts
from ..torchtools.watch import copied_storage
from .cursor import FIRST_VALUE
from .evictor import Evictor
from .leaving import cause_of
from .planned_values import PlannedValues
from .records import Hold
from .replay import replay_call
from .tier import StepTier
from .verification import Difference, new_witness


@dataclass(slots=True)
class Effort:
    """What being able to replay costs a step, and what it gains.

    Attributes:
        recording_ms: Time that recording its ops has taken.
        gained_ms: By how much copying what was dropped would have taken longer than replaying it.
    """

    recording_ms: float = 0.0
    gained_ms: float = 0.0


class ValueOwner:
    """The owner of the values of one step. Saved values live as long as autograd holds a handle on them.

    Args:
        evictor: Holds the budget.
        tier: Room in the tier for what leaves under pressure.

    Attributes:
        saved: The values that autograd has saved, and those that a plan moves, by number.
        recipes: The calls that can run again.
        planned: The values that a plan moves, or None without a plan.
        effort: What replaying has cost and gained so far.
        replay_ms: Returns the time in ms to replay a value, given its number: see `Recipes`.
        moved: Notes that a value has come or gone, and returns what may cost something else to replay: see `Recipes`.
        thread: Number of the thread that runs the step: the one of its backward pass, once that has begun.
    """

    def __init__(self, evictor: Evictor, tier: StepTier) -> None:
        self._evictor, self._tier, self._stats = evictor, tier, evictor.stats
        self._verification = evictor.verification
        self.saved: dict[int, Value] = {}
        self.recipes = Recipes(self.saved, self, evictor.speed)
        self.replay_ms, self.moved = self.recipes.replay_ms, self.recipes.moved  # asked for each value that may leave
        self.planned: PlannedValues | None = None
        self.effort = Effort()
        self.thread = threading.get_ident()

    def moves(self, planned: PlannedValues) -> None:
        """Own the values that a plan moves too."""
        self.planned = planned
        self.saved.update(planned.planned)

    # Leaving ----------------------------------------------------------------------------------------------------------

    def take_place(self, size_bytes: int) -> Place | None:
        """Return room for a value, or None if the tier has no more."""
        return self._tier.take(size_bytes)

    def released(self, number: int) -> bool:
        """Note that autograd holds no handle on a value any more, and return whether it is kept for the plan."""
        planned = self.planned
        if planned is None or number not in planned:
            self.saved.pop(number, None)
            return False
        planned.released(planned.planned[number])
        return True

    def gained(self, gained_ms: float) -> None:
        """Note by how much copying what was dropped would have taken longer than replaying it."""
        self.effort.gained_ms += gained_ms

    def remember(self, value: Value) -> None:
        """Remember the bytes of a value that leaves to be replayed, and copy them if its recipe is not proven."""
        call, storage = self.recipes.of(value.number), value.storage
        value.witness = None
        if call is None or storage is None:
            return
        if has_undefined_bytes(str(call.call.func), call.writes.index(value.number)):
            return
        key = self._key(call, value.number)
        level = self._verification.level(key, is_foreign=call.is_foreign, device_type=storage.device.type)
        if level == Level.NONE:
            return
        value.witness = witness = new_witness(key, level)
        witness.take(storage)
        place = self._tier.take(value.size_bytes) if level == Level.COPIED else None
        if place is not None:
            witness.start_copy(place, storage)
            witness.finish_copy()
            self._stats.verified_bytes += value.size_bytes

    def let_sources_leave(self) -> None:
        """Have what the plan holds for replays leave under pressure, as the step has left it.

        The caller holds the lock.
        Nobody ends these holds in time any more, so each is one on a value, which comes back when a replay reads it.
        """
        planned = self.planned
        if planned is None or planned.table.gathered:
            return
        for number, storage in planned.taken_from_replays():
            value = self.saved.get(number)
            if value is None:
                value = self.saved[number] = Value(number, self, storage)
            elif value.storage is None and not value.is_copied:
                value.storage = storage
            planned.lent[number] = Hold(value, self._evictor.lock.end)
            if value.saved_at:
                self._evictor.returned(value)
            else:
                self._evictor.save(value)

    # Coming back ------------------------------------------------------------------------------------------------------

    def ensure(self, value: Value) -> torch.UntypedStorage:
        """Return a value's storage on the device. The caller holds the lock."""
        if self.planned is not None and value.number in self.planned:
            return self.planned.ensure(value)
        storage: torch.UntypedStorage = self._evictor.ensure(value)
        return storage

    def make_again(self, number: int) -> torch.UntypedStorage:
        """Replay a value from what is at hand."""
        storage: torch.UntypedStorage = self.recipes.make_again(number)
        return storage

    def replay(self, call: Any, resolve: Resolve) -> list[torch.UntypedStorage]:
        """Run a call again."""
        planned = self.planned
        if planned is not None and planned.emptied.away:
            resolve = partial(planned.resolve_emptied, resolve)
        self._evictor.look(0)  # a chain of calls can make more than there is room for
        storages = replay_call(call, resolve)
        self._stats.recomputed_ops += 1
        return storages

    def copied(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a copy of a storage."""
        return copied_storage(storage)

    def check(self, value: Value, storage: torch.UntypedStorage) -> None:
        """Compare what a replay gave with what was there, and put that in its place if it differs.

        Raises:
            ReplayDiffers: If it differs and there is no copy.
        """
        if self.planned is not None and value.number in self.planned:
            self.planned.leaving.check(value, storage)
        elif value.witness is not None:
            self._verification.compare(value.witness, storage, partial(self._difference, value.number))

    def _difference(self, number: int, was_survived: bool) -> Difference:
        """Return what to tell of a replay of a value that gave something else."""
        call = self.recipes.of(number)
        assert call is not None, "it was replayed just now"
        module = self._verification.place_of(call.recipe)
        return Difference(operator_facts(call.call.func).name, module, cause_of(call.call), was_survived)

    def returned(self, value: Value) -> None:
        """Note that a value is there again, as a replay of another one has made it on its way."""
        self._evictor.returned(value)

    def is_banned(self, call: Call, number: int) -> bool:
        """Whether a replay of a value gave something else before."""
        return self._verification.has_banned and self._verification.is_banned(self._key(call, number))

    def _key(self, call: Call, number: int) -> Hashable:
        """Return what tells the recipe of a value from others: the same in all steps that do the same."""
        if self.planned is not None and number < FIRST_VALUE:
            return self.planned.table.copies.key(number)
        return call.recipe, call.writes.index(number)
