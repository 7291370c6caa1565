"""Carries out a schedule over the machine's own values and moves, on the modelled device.

Memory is what somebody still refers to, and time is what the device's clock shows. Nothing here knows how the simulator
counts either.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pooch.analysis.dataflow import Dataflow
from pooch.ir import Action, Schedule
from pooch.machine import CopySpeed, Store, Value
from pooch.simulator.modelled import (
    ModelledClock,
    ModelledCounters,
    ModelledMemory,
    ModelledPlace,
    ModelledStorage,
    ModelledTier,
)

PLAIN = Schedule((), (), (), (), (), 0)
LEADING = ("copy_out", "free")


@dataclass
class Run:
    """What came of a step: live bytes of values at each point, and times in ms."""

    points: list[int] = field(default_factory=list)
    starts_ms: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    stall_ms: float = 0.0
    replay_ms: float = 0.0


def run_schedule(dataflow: Dataflow, schedule: Schedule) -> Run:
    """Carry out a schedule without "empty" and "refill", and give point bytes in all, as the simulator does."""
    plain, run = MachineRun(dataflow, PLAIN).run(), MachineRun(dataflow, schedule).run()
    in_core = dataflow.in_core_points.tolist()
    run.points = [a + b - c for a, b, c in zip(in_core, run.points, plain.points, strict=True)]
    return run


class MachineRun:
    """One step under a schedule."""

    def __init__(self, dataflow: Dataflow, schedule: Schedule) -> None:
        self.dataflow, self.profile, self.schedule = dataflow, dataflow.profile, schedule
        self.clock = ModelledClock(self.profile.link, self.profile.hooks.copy_ms)
        self.memory = ModelledMemory({value.size_bytes: value.allocated_bytes for value in self.profile.values})
        self.tier = ModelledTier(self.clock)
        self.store = Store(self.memory, self.tier, CopySpeed("a modelled tier"))
        self.counters = ModelledCounters()
        self.values = {value.id: Value(value.id) for value in self.profile.values}
        self.saved: set[int] = set()  # what autograd holds a handle of
        self.program: dict[int, ModelledStorage] = {}
        self.held: dict[int, ModelledStorage] = {}
        self.transient: dict[int, ModelledStorage] = {}
        self.to_drop = {action.target for action in schedule.actions if action.kind == "drop"}
        self.actions: dict[int, list[Action]] = defaultdict(list)
        for action in schedule.actions:
            self.actions[action.slot].append(action)
        self.result = Run()

    def run(self) -> Run:
        for op in self.profile.ops:
            self.entry(op.index)
            self.result.starts_ms.append(self.clock.now_ms)
            self.look_at_what_is_read(op.index)
            if op.index < self.profile.forward_ops:
                self.forward(op.index)
            self.clock.compute(self.dataflow.op_times_ms[op.index])
            self.result.points.append(self.memory.live_bytes)
            self.leave(op.index)
        self.result.starts_ms.append(self.clock.now_ms)
        self.result.step_ms, self.result.stall_ms = self.clock.now_ms, self.clock.stall_ms
        return self.result

    def entry(self, slot: int) -> None:
        actions = self.actions[slot]
        leading = next((place for place, action in enumerate(actions) if action.kind not in LEADING), len(actions))
        for action in actions[:leading]:
            self.do(action)
        self.memory.reset_peak()
        for action in actions[leading:]:
            self.do(action)
        self.result.points.append(self.memory.peak_bytes)

    def do(self, action: Action) -> None:
        value = None if action.kind == "replay" else self.values[action.target]
        match action.kind:
            case "copy_out":
                place = self.tier.take(self.profile.values[action.target].size_bytes)
                assert isinstance(place, ModelledPlace)
                self.store.start_out(value, place, self.counters)
            case "free":
                self.store.finish_out(value, self.counters)
                assert value.state == "clean"
                self.store.drop(value)
            case "copy_in":
                self.store.start_in(value, self.counters)
                self.arrive(value, value.storage)
            case "wait":
                self.store.finish_in(value, self.counters)
                assert value.state == "clean"
                if value.number not in self.saved:
                    value.storage = None  # replays alone read it, and they hold it
            case "replay":
                self.replay(action)
            case "drop":
                del (self.transient if action.target in self.transient else self.held)[action.target]

    def arrive(self, value: Value, storage: ModelledStorage) -> None:
        if value.number in self.saved or value.number in self.schedule.swapped:
            value.storage = storage
        if value.number in self.to_drop:
            self.held[value.number] = storage

    def replay(self, action: Action) -> None:
        op = self.profile.ops[action.target]
        for read in op.reads:
            assert self.is_at_hand(read), f"op {op.index} is replayed and reads value {read}"
        made = {written: self.replayed(written, action) for written in op.writes}
        self.memory.rise(self.dataflow.replay_extra_bytes(op.index))
        began_ms = self.clock.now_ms
        self.clock.compute(self.dataflow.replay_times_ms[op.index])
        self.result.replay_ms += self.clock.now_ms - began_ms
        for number in action.outputs:
            if number in self.schedule.recomputed:
                self.arrive(self.values[number], made[number])
            else:
                self.transient[number] = made[number]

    def replayed(self, number: int, action: Action) -> ModelledStorage:
        facts = self.profile.values[number]
        if facts.overwrites in action.in_place:
            old = self.transient.pop(facts.overwrites, None) or self.held.get(facts.overwrites)
            return old or self.values[facts.overwrites].storage  # type: ignore[return-value]
        return self.memory.new(facts.size_bytes)

    def is_at_hand(self, number: int) -> bool:
        if self.profile.values[number].role != "made" or number in self.transient:
            return True
        value = self.values[number]
        here = value.state in ("here", "clean", "leaving")
        return here or (number in self.held and value.state != "returning")

    def look_at_what_is_read(self, slot: int) -> None:
        """Autograd may read any saved value from its first read to its death."""
        for facts in self.profile.values:
            if facts.role == "made" and 0 <= facts.first_unpack <= slot <= facts.death:
                value = self.values[facts.id]
                assert value.state in ("here", "clean"), f"value {facts.id} is read and {value.state}"

    def forward(self, slot: int) -> None:
        for number in self.profile.ops[slot].writes:
            facts = self.profile.values[number]
            storage = self.program.pop(facts.overwrites, None) or self.memory.new(facts.size_bytes)
            self.program[number] = storage
            if facts.saved:
                self.saved.add(number)
                if number not in self.schedule.recomputed:
                    self.values[number].storage, self.values[number].size_bytes = storage, facts.size_bytes
            if number in self.schedule.sources:
                self.held[number] = storage

    def leave(self, slot: int) -> None:
        for facts in self.profile.values:
            if facts.release == slot:
                self.program.pop(facts.id, None)
            if facts.death == slot and facts.id in self.saved:
                self.saved.remove(facts.id)
                self.values[facts.id].storage = None
