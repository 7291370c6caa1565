"""A step that runs without a plan, on its profile: the machine that real steps run on, over a modelled device.

The profile's ops make values, and autograd saves them; they leave under pressure, come back when they are read, and
are made again from the calls of the step. What decides all that is `machine`; here is what it asks of a step.

A value can leave if autograd has saved it, the program no longer holds it, and the backward pass has not read it yet.
These are activations, and values that are too small to be decided on. Everything else is counted as the profile has it,
as what is live beside them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy

from ..analysis.dataflow import Dataflow
from ..ir import Choice, Op, Value
from ..ir.timeline import OnlineStep
from ..machine import Call, CopySpeed, Pressure, Recipes
from ..machine import values as machine
from ..machine.eviction import Rule
from ..machine.recipes import Resolve
from .modelled import ModelledClock, ModelledCounters, ModelledMemory, ModelledStorage, ModelledTier

GIVES_UP = 20  # times the ops of the step: a run that replays so many gets nowhere, and nothing leaves any more

MakeRule = Callable[[Dataflow, Callable[[], float]], Rule]


def run_online(
    dataflow: Dataflow,
    budget_bytes: int,
    host_budget_bytes: int | None = None,
    make_rule: MakeRule | None = None,
) -> OnlineStep:
    """Simulate one step without a plan.

    Args:
        dataflow: the profile, and the region whose activations can leave.
        budget_bytes: bound on all device bytes.
        host_budget_bytes: bound on the bytes in the swap tier; None: unlimited.
        make_rule: gives the rule of one step, of the profile and of what tells the time in ms; None: Pooch's own.
    """
    return ProfiledStep(dataflow, budget_bytes, host_budget_bytes, make_rule).run()


class ProfiledStep:
    """The step while it runs: the owner of its values, and the kitchen of its recipes."""

    def __init__(
        self,
        dataflow: Dataflow,
        budget_bytes: int,
        host_budget_bytes: int | None,
        make_rule: MakeRule | None,
    ) -> None:
        self._dataflow, self._profile = dataflow, dataflow.profile
        link = dataflow.profile.link
        self.clock = ModelledClock(link, dataflow.profile.hooks.copy_ms)
        self.memory = ModelledMemory({value.size_bytes: value.allocated_bytes for value in self._profile.values})
        self.tier = ModelledTier(self.clock, host_budget_bytes)
        self.rule = Rule() if make_rule is None else make_rule(dataflow, lambda: self.clock.now_ms)
        self._budget_bytes, self._counters = budget_bytes, ModelledCounters()
        speed = CopySpeed(link.tier)
        speed.start_from(link)
        self.pressure = Pressure(
            budget_bytes, self.memory, self.memory, self.tier, speed, self._counters, self.rule.policy
        )
        self.thread = threading.get_ident()
        self.saved: dict[int, machine.Value] = {}
        self.recipes = Recipes(self.saved, self, speed)
        self.decisions: dict[int, Choice] = {value.id: "keep" for value in dataflow.activations}
        made_here = (v.id for v in self._profile.values if v.role == "made" and v.producer in dataflow.forward_slots)
        self._made_here = frozenset(made_here)  # by ops that a runtime sees
        self._may_leave = {v.id: v for v in self._profile.values if v.id in self._made_here and self._can_leave(v)}
        self._beside_bytes = self._bytes_beside()
        self._released: defaultdict[int, list[int]] = defaultdict(list)  # by the slot before which it is so
        self._ended: defaultdict[int, list[int]] = defaultdict(list)
        for value in self._profile.values:
            self._released[value.release + 1].append(value.id)
            self._ended[dataflow.life_ends[value.id] // 2].append(value.id)
        self._saved_slot = self._slots_of_saving()
        self._saves_at: defaultdict[int, list[machine.Value]] = defaultdict(list)
        self._missing: set[int] = set()
        self._most_replays = GIVES_UP * dataflow.end
        self._replay_ms = 0.0
        self._evictions = 0

    def _can_leave(self, value: Value) -> bool:
        is_seen = self._dataflow.region == "step" or not value.saved_outside_model
        return value.saved and is_seen and value.overwritten_at < 0

    def _bytes_beside(self) -> list[int]:
        """By point: what is live in-core beside the values that can leave."""
        change = numpy.zeros(2 * self._dataflow.end + 1, dtype=numpy.int64)
        for value in self._may_leave.values():
            first, last = self._dataflow.in_core_span(value)
            change[first] += value.allocated_bytes
            change[last + 1] -= value.allocated_bytes
        beside: list[int] = (self._dataflow.in_core_points - numpy.cumsum(change[:-1])).tolist()
        return beside

    def _slots_of_saving(self) -> dict[int, int]:
        """The forward op with which autograd saves each value, as far as the order tells in which it lets go of them.

        That order is the reverse of saving, and an op saves what it makes or reads.
        """
        touching: defaultdict[int, list[int]] = defaultdict(list)
        for op in self._profile.ops[: self._dataflow.forward_slots.stop]:
            for number in {*op.reads, *op.writes} & self._may_leave.keys():
                touching[number].append(op.index)
        ends, latest, found = self._dataflow.life_ends, 0, dict[int, int]()
        for number in sorted(self._may_leave, key=lambda number: (-ends[number], number)):
            slots = touching[number]
            found[number] = next((slot for slot in slots if slot >= latest), slots[-1])
            latest = max(latest, found[number])
        return found

    def run(self) -> OnlineStep:
        """Run the ops of the profile, one after the other."""
        self.memory.set_beside(self._beside_bytes[0])
        self.pressure.begin(self._counters)
        self.pressure.set_budget(self._budget_bytes)
        self.pressure.store.on_move = self._moved
        reads = dict(self._dataflow.anchors)
        for op in self._profile.ops:
            self._let_go_before(op.index)
            self.memory.set_beside(self._beside_bytes[2 * op.index])
            for number in reads.get(op.index, ()):
                self._read(number)
            self._run_op(op)
        self.pressure.store.on_move = None
        peak_bytes = self.memory.peak_bytes
        return OnlineStep(
            step_ms=self.clock.now_ms,
            peak_bytes=peak_bytes,
            over_bytes=max(0, peak_bytes - self._budget_bytes),
            lost_ms=self.clock.now_ms - sum(self._dataflow.op_times_ms),
            decisions=self.decisions,
            stall_ms=self.clock.stall_ms,
            replay_ms=self._replay_ms,
            evictions=self._evictions,
            copies_out=self.tier.copies_out,
            copies_in=self.tier.copies_in,
            replays=self._counters.recomputed_ops,
        )

    # The program ------------------------------------------------------------------------------------------------------

    def _let_go_before(self, slot: int) -> None:
        """Let go of what the program and autograd hold no longer."""
        for number in self._released[slot]:
            if number in self._may_leave:
                _stored(self.saved[number]).held_by_program -= 1
        for number in self._ended[slot]:
            if number in self._may_leave:
                self.pressure.lock.end(self.saved[number])
            self.saved.pop(number, None)

    def _run_op(self, op: Op) -> None:
        self._overwrite(op)
        self.memory.set_beside(self._beside_bytes[2 * op.index + 1])
        for number in op.writes:
            self._make(self._profile.values[number])
        for made in self._saves_at.pop(op.index, ()):
            self.pressure.save(made)
        self._access((*op.reads, *op.writes))
        self.clock.compute(self._dataflow.op_times_ms[op.index])
        if op.index in self._dataflow.forward_slots:
            self._keep(op)
            self.pressure.write_ahead()

    def _overwrite(self, op: Op) -> None:
        """What autograd saved of a storage that is written over is no source of replays any more."""
        for number in op.writes:
            self.saved.pop(self._profile.values[number].overwrites, None)

    def _make(self, value: Value) -> None:
        """Register a value that an op has made, if autograd saves it."""
        if value.id in self._may_leave:
            self.memory.ask_for(value.allocated_bytes)
            storage = ModelledStorage(self.memory, value.size_bytes, value.allocated_bytes)
            storage.held_by_program = 1
        elif value.saved and value.id in self._made_here:
            storage = ModelledStorage(self.memory, 0)  # it stays, and its bytes are counted beside
        else:
            return
        made = self.saved[value.id] = machine.Value(value.id, self, storage)
        made.handles = 1
        if value.id in self._may_leave:
            self._saves_at[self._saved_slot[value.id]].append(made)

    def _keep(self, op: Op) -> None:
        """Keep the call of an op, if all that it reads can be made again or is always at hand."""
        made = tuple(filter(self._made_here.__contains__, op.reads))
        others = (self._profile.values[number] for number in op.reads if number not in self._made_here)
        can_run_again = op.refusal is None and all(map(self._dataflow.is_always_at_hand, others))
        if can_run_again and all(number in self.recipes for number in made):
            self.recipes.add(Call(op, made, op.writes, self._dataflow.replay_times_ms[op.index]))

    def _read(self, number: int) -> None:
        """The backward pass reads a value, and may read it again until autograd lets go of it."""
        if number not in self._may_leave:
            return
        value = self.saved[number]
        with self.pressure.lock:
            self.pressure.reading(value)
            self.pressure.ensure(value)
            value.is_busy = True
            self.pressure.read_ahead(value)
            value.is_busy = False
        _stored(value).held_by_program += 1

    def _access(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self.rule.accessed(number)

    # What the machine tells and asks: see `machine.values.Owner` and `machine.recipes.Kitchen` ------------------------

    def _moved(self, kind: str, value: machine.Value, storage: object) -> None:
        if kind == "left":
            self._evictions += 1
            if value.number in self.decisions:
                self.decisions[value.number] = "swap" if value.is_copied else "recompute"
            if not value.is_copied:
                self._missing.add(value.number)
                self.rule.dropped(value.number)
        elif kind == "returned":
            self.rule.accessed(value.number)

    def _is_back(self, number: int) -> None:
        if number in self._missing:
            self._missing.remove(number)
            self.rule.made_again(number)

    def take_place(self, size_bytes: int) -> machine.Place | None:
        """Return room for a value, or None if the tier has no more."""
        return self.tier.take(size_bytes)

    def replay_ms(self, number: int) -> float:
        """Return the time in ms to replay a value from what is at hand now, or infinity if it cannot be replayed."""
        return self.recipes.replay_ms(number)

    def make_again(self, number: int) -> ModelledStorage:
        """Replay a value from what is at hand."""
        storage: ModelledStorage = self.recipes.make_again(number)
        return storage

    def remember(self, value: machine.Value) -> None:
        """Compare nothing: a modelled storage has no contents."""

    def moved(self, value: machine.Value) -> Iterable[machine.Value]:
        """Forget the costs of replays that need a value, as it has come or gone, and return what they make."""
        return self.recipes.moved(value)

    def returned(self, value: machine.Value) -> None:
        """Note that a value is there again, as a replay of another one has made it on its way."""
        self.pressure.returned(value)

    def gained(self, gained_ms: float) -> None:
        """Do nothing: nobody asks what replays gain."""

    def released(self, number: int) -> None:
        """Note that autograd holds no handle on a value any more."""
        self.saved.pop(number, None)
        self._is_back(number)

    def ensure(self, value: machine.Value) -> ModelledStorage:
        """Return a value's storage on the device."""
        storage: ModelledStorage = self.pressure.ensure(value)
        return storage

    def replay(self, op: Op, resolve: Resolve) -> list[ModelledStorage]:
        """Run an op again. What it writes over is a copy."""
        over = {self._profile.values[number].overwrites: number for number in op.writes}
        held: list[ModelledStorage] = []
        made: dict[int, ModelledStorage] = {}
        try:
            for number in filter(self._made_here.__contains__, op.reads):
                storage = resolve(number, number in over)
                storage.held_by_program += 1  # a tensor on it
                held.append(storage)
                if number in over:
                    made[over[number]] = storage
            for number in op.writes:
                if number not in made:
                    made[number] = self.memory.new(self._profile.values[number].size_bytes)
            self.memory.rise(self._dataflow.replay_extra_bytes(op.index))
        finally:
            for storage in held:
                storage.held_by_program -= 1
        self._access(op.reads)
        self._replayed(op)
        return [made[number] for number in op.writes]

    def _replayed(self, op: Op) -> None:
        began_ms = self.clock.now_ms
        self.clock.compute(self._dataflow.replay_times_ms[op.index])
        self._replay_ms += self.clock.now_ms - began_ms
        self._counters.recomputed_ops += 1
        if self._counters.recomputed_ops > self._most_replays:
            self.memory.let_go()

    def copied(self, storage: ModelledStorage) -> ModelledStorage:
        """Return a copy of a storage."""
        return self.memory.new(storage.nbytes())

    def check(self, value: machine.Value, storage: ModelledStorage) -> None:
        """Note that a value is made again. There is nothing to compare."""
        self._is_back(value.number)
        self.rule.accessed(value.number)

    def is_banned(self, call: Call, number: int) -> bool:
        """Return False: every recipe gives what it gave before."""
        return False


def _stored(value: machine.Value) -> ModelledStorage:
    assert value.storage is not None, "what the program holds stays"
    storage: ModelledStorage = value.storage
    return storage
