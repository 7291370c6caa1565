"""Executes a schedule on real small arrays: the meaning of a schedule, written down a third time.

Contents are deterministic mixes of what an op reads, so a wrong, stale or half-arrived value shows. Memory is what
Python's own reference counts keep alive, so whoever forgets to let go, or lets go too early, shows as well.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field

import numpy

from pooch.analysis.dataflow import Dataflow
from pooch.ir import Action, Schedule

PLAIN = Schedule((), (), (), (), (), 0)


class Fault(Exception):
    """The schedule did something that a runtime could not do, or gave autograd something else than it saved."""


class Meter:
    """Bytes of all storages that somebody still refers to."""

    def __init__(self) -> None:
        self.live_bytes = 0

    def storage(self, data: numpy.ndarray, number_bytes: int) -> Storage:
        made = Storage(data)
        made.taken[0] = number_bytes
        self.live_bytes += number_bytes
        weakref.finalize(made, self._gone, made.taken)
        return made

    def empty(self, storage: Storage) -> None:
        """Whoever holds the storage goes on holding nothing."""
        self._gone(storage.taken)
        storage.taken[0], storage.contents = 0, None

    def refill(self, storage: Storage, data: numpy.ndarray, number_bytes: int) -> None:
        storage.taken[0], storage.contents = number_bytes, data
        self.live_bytes += number_bytes

    def _gone(self, taken: list[int]) -> None:
        self.live_bytes -= taken[0]


class Storage:
    """Device memory with contents; None: it was emptied. `taken`: its bytes, in a list that outlives it."""

    def __init__(self, data: numpy.ndarray) -> None:
        self.contents: numpy.ndarray | None = data
        self.taken = [0]

    @property
    def data(self) -> numpy.ndarray:
        if self.contents is None:
            raise Fault("an emptied storage is read")
        return self.contents


@dataclass
class Run:
    """What came of a step: live bytes of values at each point, and everything that was unpacked, in order."""

    points: list[int] = field(default_factory=list)
    unpacked: list[tuple[int, int, bytes]] = field(default_factory=list)


def run_plain(dataflow: Dataflow) -> Run:
    return _Interpreter(dataflow, PLAIN).run()


def run_schedule(dataflow: Dataflow, schedule: Schedule) -> Run:
    """Execute, compare every unpack with the plain step, and give point bytes in all (as the simulator does)."""
    plain = run_plain(dataflow)
    others = dataflow.in_core_points - numpy.array(plain.points)
    run = _Interpreter(dataflow, schedule).run()
    if run.unpacked != plain.unpacked:
        wrong = next(a for a, b in zip(run.unpacked, plain.unpacked, strict=True) if a != b)
        raise Fault(f"slot {wrong[0]}: value {wrong[1]} has other contents than in the plain step")
    run.points = [int(a + b) for a, b in zip(run.points, others, strict=True)]
    return run


class _Interpreter:
    def __init__(self, dataflow: Dataflow, schedule: Schedule) -> None:
        self.dataflow, self.profile, self.schedule = dataflow, dataflow.profile, schedule
        self.meter = Meter()
        self.program: dict[int, Storage] = {}
        self.records: dict[int, Storage | None] = {}  # what autograd saved; None: not there just now
        self.held: dict[int, Storage] = {}
        self.transient: dict[int, Storage] = {}
        self.copying: set[int] = set()
        self.tier: dict[int, numpy.ndarray] = {}
        self.arriving: set[int] = set()
        self.to_drop = {action.target for action in schedule.actions if action.kind == "drop"}
        self.actions: dict[int, list[Action]] = defaultdict(list)
        for action in schedule.actions:
            self.actions[action.slot].append(action)
        self.result = Run()

    def run(self) -> Run:
        for slot in range(len(self.profile.ops)):
            self.entry(slot)
            self.unpack(slot)
            if slot < self.profile.forward_ops:
                self.forward(slot)
                self.touch(slot)
            self.result.points.append(self.meter.live_bytes)
            self.leave(slot)
        return self.result

    def entry(self, slot: int) -> None:
        self.slot = slot
        actions = self.actions[slot]
        leading = next((i for i, a in enumerate(actions) if a.kind not in ("copy_out", "free", "empty")), len(actions))
        for action in actions[:leading]:
            self.do(action)
        highest = self.meter.live_bytes
        for action in actions[leading:]:
            during = self.do(action)
            highest = max(highest, during, self.meter.live_bytes)
        self.result.points.append(highest)

    def do(self, action: Action) -> int:
        return getattr(self, "do_" + action.kind)(action) or 0

    def do_copy_out(self, action: Action) -> None:
        if self.records.get(action.target) is None:
            raise Fault(f"copy out of {action.target}, which is not there")
        self.copying.add(action.target)

    def do_free(self, action: Action) -> None:
        storage = self.records.get(action.target)
        if storage is None:
            raise Fault(f"free of {action.target}, which is not there")
        self.complete_copy(action.target, storage)
        self.records[action.target] = None

    def complete_copy(self, value: int, storage: Storage) -> None:
        if value in self.copying:
            self.copying.remove(value)
            self.tier[value] = storage.data.copy()
        if value not in self.tier:
            raise Fault(f"{value} leaves and was not copied")

    def do_empty(self, action: Action) -> None:
        """In place: the program and autograd hold the same storage."""
        storage = self.program.get(action.target)
        if storage is None or storage.contents is None:
            raise Fault(f"empty of {action.target}, of which the program holds nothing")
        if action.target in self.schedule.swapped:
            self.complete_copy(action.target, storage)
        self.meter.empty(storage)

    def do_refill(self, action: Action) -> None:
        storage = self.program.get(action.target)
        if storage is None or storage.contents is not None or action.target not in self.tier:
            raise Fault(f"refill of {action.target}, which is not empty with the program")
        garbage = numpy.full_like(self.tier[action.target], -1)
        self.meter.refill(storage, garbage, self.allocated(action.target))
        self.arriving.add(action.target)

    def do_copy_in(self, action: Action) -> None:
        if action.target not in self.tier:
            raise Fault(f"copy in of {action.target}, which is not in the tier")
        garbage = numpy.full_like(self.tier[action.target], -1)
        self.arrive(action.target, self.meter.storage(garbage, self.allocated(action.target)))
        self.arriving.add(action.target)

    def do_wait(self, action: Action) -> None:
        if action.target in self.program and action.target in self.arriving:
            self.arriving.remove(action.target)
            self.program[action.target].data[:] = self.tier[action.target]
            return
        storage = self.held.get(action.target) or self.records.get(action.target)
        if action.target not in self.arriving or storage is None:
            raise Fault(f"wait for {action.target}, which is not on its way")
        self.arriving.remove(action.target)
        storage.data[:] = self.tier[action.target]

    def do_drop(self, action: Action) -> None:
        if action.target in self.transient:
            del self.transient[action.target]
        elif action.target in self.held:
            del self.held[action.target]
        else:
            raise Fault(f"drop of {action.target}, which is not held")

    def do_replay(self, action: Action) -> int:
        op = self.profile.ops[action.target]
        contents = self.compute(op.index, [self.replay_read(value) for value in op.reads])
        made: dict[int, Storage] = {}
        for value, data in zip(op.writes, contents, strict=True):
            old = self.profile.values[value].overwrites
            if old in action.in_place:
                made[value] = self.take_over(old, data)
            else:
                made[value] = self.meter.storage(data, self.allocated(value))
        during = self.meter.live_bytes + self.dataflow.replay_extra_bytes(op.index)
        for value in action.outputs:
            if value in self.schedule.recomputed:
                self.arrive(value, made[value])
            else:
                self.transient[value] = made[value]
        return during

    def take_over(self, old: int, data: numpy.ndarray) -> Storage:
        """Write over whatever storage the old value has, whoever holds it."""
        storage = self.transient.pop(old, None) or self.held.get(old) or self.records.get(old)
        if storage is None:
            raise Fault(f"nothing of {old} to write over")
        storage.data[:] = data
        return storage

    def replay_read(self, value: int) -> numpy.ndarray:
        if self.dataflow.is_always_at_hand(self.profile.values[value]):
            return self.external(value)
        if self.profile.values[value].role == "transient":
            return self.gathered_read(value)
        storage = self.transient.get(value) or self.held.get(value)
        if storage is None and value in (*self.schedule.recomputed, *self.schedule.swapped):
            storage = self.records.get(value)
        if storage is None:
            raise Fault(f"a replay reads {value}, which is not there")
        return storage.data

    def arrive(self, value: int, storage: Storage) -> None:
        if value in self.records:
            self.records[value] = storage
        if value in self.to_drop:
            self.held[value] = storage

    def unpack(self, slot: int) -> None:
        """Autograd may read any saved value from its first unpack to its death."""
        for value in self.profile.values:
            if value.role == "made" and 0 <= value.first_unpack <= slot <= value.death:
                storage = self.records.get(value.id)
                if storage is None:
                    raise Fault(f"slot {slot}: value {value.id} is unpacked and not there")
                self.result.unpacked.append((slot, value.id, storage.data.tobytes()))

    def forward(self, slot: int) -> None:
        op = self.profile.ops[slot]
        contents = self.compute(slot, [self.program_read(value) for value in op.reads])
        for value, data in zip(op.writes, contents, strict=True):
            facts = self.profile.values[value]
            if facts.overwrites >= 0:
                storage = self.program.pop(facts.overwrites)
                storage.data[:] = data
            else:
                storage = self.meter.storage(data, facts.allocated_bytes)
            self.program[value] = storage
            if facts.saved:
                self.records[value] = None if value in self.schedule.recomputed else storage
            if value in self.schedule.sources:
                self.held[value] = storage

    def touch(self, slot: int) -> None:
        """The program looks at what it holds; when the region is over, at all of it."""
        for value in self.profile.values:
            if value.role == "made" and value.id in self.program and slot in (value.touches or ()):
                self.result.unpacked.append((slot, value.id, self.program[value.id].data.tobytes()))
        if slot == self.dataflow.forward_slots.stop - 1:
            for value, storage in self.program.items():
                if self.profile.values[value].release >= slot:
                    self.result.unpacked.append((slot, value, storage.data.tobytes()))

    def program_read(self, value: int) -> numpy.ndarray:
        if self.profile.values[value].role != "made":
            return self.external(value)
        return self.program[value].data

    def leave(self, slot: int) -> None:
        for value in self.profile.values:
            if value.release == slot:
                self.program.pop(value.id, None)
            if value.death == slot:
                self.records.pop(value.id, None)

    def gathered_read(self, value: int) -> numpy.ndarray:
        windows = [window for unit in self.profile.gathered if value in unit.values for window in unit.windows]
        if not any(first <= self.slot <= last for first, last in windows):
            raise Fault(f"slot {self.slot}: a replay reads {value}, which FSDP has not gathered")
        return self.external(value)

    def external(self, value: int) -> numpy.ndarray:
        return numpy.arange(self.profile.values[value].size_bytes, dtype=numpy.int64) + 1000 * (value + 1)

    def compute(self, op: int, reads: list[numpy.ndarray]) -> list[numpy.ndarray]:
        """Mix everything read: position, order and op matter."""
        seed = (op + 1) * 1_000_003
        for place, data in enumerate(reads):
            weights = numpy.arange(3, 3 + 2 * len(data), 2, dtype=numpy.int64)
            seed = (seed * 31 + int((data * weights).sum()) * (place + 7)) % 2_147_483_647
        writes = self.profile.ops[op].writes
        return [self.fill(seed + 17 * place, self.profile.values[v].size_bytes) for place, v in enumerate(writes)]

    def fill(self, seed: int, size: int) -> numpy.ndarray:
        return (numpy.arange(size, dtype=numpy.int64) * 7919 + seed) % 1_000_003

    def allocated(self, value: int) -> int:
        return self.profile.values[value].allocated_bytes
