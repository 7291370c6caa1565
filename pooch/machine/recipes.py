"""Recipes: the calls that made the values of a step, and how a value that was dropped is made again from them."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ..ground.errors import PlanMismatch
from .speed import CopySpeed
from .values import Storage, Value

_LONGEST_REPLAY = 200  # calls; what would need more is copied
NEVER_MS = float("inf")
# Returns the storage of a value of the step. The flag says that the call will write into it.
Resolve = Callable[[int, bool], Storage]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the step and what it made.

    Attributes:
        call: The call, for whoever can run it again.
        reads: Numbers of the values of the step that it reads.
        writes: Numbers of the values that it made.
        time_ms: How long it took.
        recipe: Tells it, with all that leads to it, from other calls. The same in all steps that do the same.
        is_foreign: Whether it or anything that leads to it runs operators that are not PyTorch's own.
    """

    call: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    time_ms: float
    recipe: int = 0
    is_foreign: bool = False


class Kitchen(Protocol):
    """Whoever runs calls again."""

    def ensure(self, value: Value) -> Storage:
        """Return a value's storage on the device."""

    def replay(self, call: Any, resolve: Resolve) -> list[Storage]:
        """Run a call again, and return the storages of what it makes."""

    def copied(self, storage: Storage) -> Storage:
        """Return a copy of a storage on the device."""

    def check(self, value: Value, storage: Storage) -> None:
        """Compare what a replay gave with what was there, and put that in its place if it differs."""

    def returned(self, value: Value) -> None:
        """Note that a value is there again, as a replay of another one has made it on its way."""

    def is_banned(self, call: Call, number: int) -> bool:
        """Whether a call must not be used to make one of its values again."""


class Recipes:
    """The calls of one step.

    Args:
        saved: The values that autograd has saved, by number. Shared with the step, which adds and removes them.
        kitchen: Runs calls again. It is not kept alive.
        speed: How fast copies are.

    Attributes:
        sources: Storages of values that are held for replays, by number, whether autograd has saved them or not.
        arriving: Returns calls that were recorded elsewhere since it was last called.
        may_go: Whether a value is read, or let go of, in another order than it was saved in, as a plan has it. What
            its replay needs need not be there by then, though it is there now.
        stays: Whether a value stays at hand to the end of the step.
    """

    def __init__(self, saved: dict[int, Value], kitchen: Kitchen, speed: CopySpeed) -> None:
        # Not a proxy: whoever looks at all objects of the process, as people do for tensors, would fail on a dead one.
        self._saved, self._kitchen_if_there, self._speed = saved, weakref.ref(kitchen), speed
        self.sources: dict[int, Storage] = {}
        self.arriving: Callable[[], Collection[Call]] = tuple
        self.may_go: Callable[[int], bool] = frozenset[int]().__contains__
        self.stays: Callable[[int], bool] = frozenset[int]().__contains__
        self._arrival = threading.Lock()
        self._calls: dict[int, Call] = {}  # by what they made, in the order in which they ran
        self._costs_ms: dict[int, float] = {}
        self._looked_at_by: dict[int, set[int]] = {}  # by a value: those whose costs depend on whether it is there
        self._out_of_date: set[int] = set()  # values whose calls read what has changed since

    @property
    def _kitchen(self) -> Kitchen:
        kitchen = self._kitchen_if_there()
        assert kitchen is not None, "a step lives as long as its handles"
        return kitchen

    def __contains__(self, number: int) -> bool:
        return self.of(number) is not None

    def add(self, call: Call) -> None:
        """Keep a call that can run again."""
        self._take_arrived()
        self._keep(call)

    def _take_arrived(self) -> None:
        with self._arrival:  # whoever waits here finds them
            for call in self.arriving():
                self._keep(call)

    def _keep(self, call: Call) -> None:
        for number in call.writes:
            self._calls[number] = call

    def of(self, number: int) -> Call | None:
        """Return the call that made a value, or None if it cannot run again."""
        call = self._calls.get(number)
        if call is None:
            self._take_arrived()
            call = self._calls.get(number)
        return call

    def calls(self) -> list[Call]:
        """Return all calls, in the order in which they ran."""
        self._take_arrived()
        return list({id(call): call for call in self._calls.values()}.values())

    def readers(self, numbers: Collection[int]) -> list[Call]:
        """Return the calls that read or made any of these values."""
        self._take_arrived()
        wanted = set(numbers)
        return [
            call
            for call in self._calls.values()
            if not (wanted.isdisjoint(call.reads) and wanted.isdisjoint(call.writes))
        ]

    # What it costs ----------------------------------------------------------------------------------------------------

    def moved(self, value: Value) -> list[Value]:
        """Forget the costs of replays that need a value, as it has come or gone, and return what they make."""
        looked_at_by = self._looked_at_by.pop(value.number, None)
        if not looked_at_by:
            return []
        changed = [each for each in looked_at_by if self._costs_ms.pop(each, None) is not None]
        return [self._saved[each] for each in changed if each in self._saved]

    def replay_ms(self, number: int) -> float:
        """Return the time in ms to make a value again when it is read, or infinity if that cannot be done.

        That is from what is at hand now, except for what the backward pass reads before and lets go of.
        """
        known_ms = self._costs_ms.get(number)
        if known_ms is None:
            looked_at = {number}
            known_ms = self._costs_ms[number] = self._chain_ms(number, looked_at)
            for each in looked_at:
                self._looked_at_by.setdefault(each, set()).add(number)
        return known_ms

    def _chain_ms(self, number: int, looked_at: set[int]) -> float:
        total_ms, seen, ahead = 0.0, set[int](), [number]
        wanted = self._saved.get(number)
        read_at = wanted.saved_at if wanted is not None and wanted.saved_at else math.inf
        kitchen, is_uncertain = self._kitchen, self.may_go(number)
        while ahead:
            current = ahead.pop()
            call = self._calls.get(current) or self.of(current)
            if call is None or current in self._out_of_date or kitchen.is_banned(call, current):
                return NEVER_MS
            if id(call) in seen:
                continue
            seen.add(id(call))
            total_ms += call.time_ms
            if len(seen) > _LONGEST_REPLAY:
                return NEVER_MS
            looked_at.update(call.reads)
            for read in call.reads:
                value = self._saved.get(read)  # a plan lets go of `sources` when it needs them no longer
                may_go = (is_uncertain or self.may_go(read)) and not self.stays(read)
                if value is None or value.saved_at > read_at or may_go:
                    ahead.append(read)  # what is saved later, the backward pass reads before, and lets go of it
                elif value.storage is None:  # not asked by its state: chains are walked for each value that leaves
                    if value.is_copied:
                        total_ms += self._speed.back_ms(value.size_bytes)
                    else:
                        ahead.append(read)
        return total_ms

    # Making again -----------------------------------------------------------------------------------------------------

    def make_again(self, number: int) -> Storage:
        """Make a value again from what is at hand, oldest calls first. Other values on the way stay if they were away
        and pressure can have them leave again.

        Raises:
            PlanMismatch: If a call that it depends on was not kept.
        """
        order = self._order(number)
        last_use = {read: position for position, call in enumerate(order) for read in call.reads}
        made: dict[int, Storage] = {}
        staying: dict[int, Value] = {}  # values among `made`: dropping one would free nothing yet

        def resolve(read: int, written: bool) -> Storage:
            storage = made.get(read)
            if storage is None:
                storage = self.sources.get(read)
            if storage is None:
                value = self._saved.get(read)
                storage = self._kitchen.ensure(value) if value is not None else self.make_again(read)
            return self._kitchen.copied(storage) if written else storage

        try:
            for position, call in enumerate(order):
                storages = self._kitchen.replay(call.call, resolve)
                for written, storage in zip(call.writes, storages, strict=True):
                    made[written] = storage
                    value = self._saved.get(written)
                    if value is not None and value.state == "unmade":
                        self._kitchen.check(value, storage)
                        if value.saved_at and not value.is_busy:
                            value.forget_witness()
                            value.storage, value.is_busy = storage, True
                            staying[written] = value
                            self._kitchen.returned(value)
                del storages, storage  # what nobody reads any more may leave during the next call
                for read in {*call.reads, *call.writes} & made.keys():
                    if read != number and last_use.get(read, -1) <= position:
                        del made[read]
                        _may_leave(staying.pop(read, None))
        finally:
            for value in staying.values():
                _may_leave(value)
        return made[number]

    def _order(self, number: int) -> list[Call]:
        """Return the calls that make a value from what is at hand, in the order in which they ran."""
        found: dict[int, Call] = {}
        ahead = [number]
        while ahead:
            current = ahead.pop()
            call = self.of(current)
            if call is None:
                raise PlanMismatch(
                    f"the backward pass needs value {current} again, but the op that makes it was not recorded"
                )
            if call.writes[0] in found:
                continue
            found[call.writes[0]] = call
            for read in call.reads:
                value = self._saved.get(read)
                if read not in self.sources and (value is None or value.state == "unmade"):
                    ahead.append(read)
        return [found[first] for first in sorted(found)]

    # Changes ----------------------------------------------------------------------------------------------------------

    def give_up(self, calls: Iterable[Call]) -> set[int]:
        """Prepare for a change after which calls would not give the same any more, nor what is made from it.

        What could only be made again by them is brought back first; what leaves from here on is copied. The caller
        holds the lock. Returns the values that cannot be made again any more.
        """
        changing = {number for call in calls for number in call.writes}
        if not changing:
            return changing
        self._take_arrived()
        for number, call in self._calls.items():  # in the order in which they ran
            if not changing.isdisjoint(call.reads):
                changing.add(number)
        self._out_of_date |= changing
        self._costs_ms.clear()
        for value in list(self._saved.values()):
            if value.number in changing and value.handles and value.state == "unmade":
                self._kitchen.ensure(value)
        for number in changing:
            self._calls.pop(number, None)
        self._out_of_date -= changing
        return changing


def _may_leave(value: Value | None) -> None:
    if value is not None:
        value.is_busy = False
