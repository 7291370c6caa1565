"""Simulates a step in which also leaves what outlives it: parameters, gradients, the optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.occupancy import occupancy
from ..analysis.persistence import MoveAction, Residence
from ..ir import Action, Schedule, Timeline
from .simulate import Play

_MOST_STEPS, _SAME_MS = 8, 1e-6
_MAKING_ROOM = ("copy_out", "free")  # come before what a schedule does in the same slot; what takes room comes after it


@dataclass(frozen=True, slots=True)
class MovingStep:
    """Prediction for one of many equal steps.

    Attributes:
        timeline: of the step with everything in its bytes. What comes after the backward pass is in its duration alone.
        residence: who of what outlives the step is away when.
        optimizer_ms: what of the duration comes after the backward pass: copies for the optimizer's step, in so far as
            they are waited for. What the optimizer computes is not in it.
    """

    timeline: Timeline
    residence: Residence
    optimizer_ms: float


def simulate_moving(dataflow: Dataflow, schedule: Schedule, residence: Residence, *, detail: bool = True) -> MovingStep:
    """Predict one of many equal steps under a schedule.

    What is still being copied when a step ends is in the way of the next one, so the step counts that lasts as long as
    the one before it.

    Args:
        dataflow: of the step without what could leave of what outlives it.
        schedule: what to do with activations.
        residence: who of what outlives the step is away when.
        detail: also list what each stream does.
    """
    play = _MovingPlay(dataflow, detail, residence)
    duration_ms = -1.0
    for _ in range(_MOST_STEPS):
        start_ms, stall_ms, replay_ms = play.now_ms, play.stall_ms, play.replay_ms
        play.slot_start_ms.clear()
        play.intervals.clear()
        play.run(schedule)
        if abs(play.now_ms - start_ms - duration_ms) <= _SAME_MS:
            break
        duration_ms = play.now_ms - start_ms
    others = occupancy(dataflow, schedule.actions, schedule.recomputed).point_bytes
    points = others + residence.point_bytes()
    in_slices = (residence.here_bytes + residence.cycle.temporary_bytes)[dataflow.end :]
    optimizer_peak_bytes = int(others[-2]) + int(in_slices.max(initial=0))
    intervals = (replace(i, start_ms=i.start_ms - start_ms, end_ms=i.end_ms - start_ms) for i in play.intervals)
    timeline = Timeline(
        step_ms=play.now_ms - start_ms,
        stall_ms=play.stall_ms - stall_ms,
        replay_ms=play.replay_ms - replay_ms,
        peak_bytes=max(int(points.max(initial=0)), optimizer_peak_bytes),
        point_bytes=points,
        slot_start_ms=numpy.array([*play.slot_start_ms, play.backward_end_ms]) - start_ms,
        host_bytes=schedule.host_bytes + residence.tier_bytes,
        intervals=tuple(intervals),
    )
    return MovingStep(timeline, residence, play.now_ms - play.backward_end_ms)


class _MovingPlay(Play):
    """The clocks of steps that follow one another.

    Attributes:
        backward_end_ms: when the latest backward pass ended.
    """

    def __init__(self, dataflow: Dataflow, detail: bool, residence: Residence) -> None:
        super().__init__(dataflow, detail)
        self._end = dataflow.end
        self._moves = residence.actions()
        self._out_ms: dict[int, float] = {}
        self._in_ms: dict[int, float] = {}
        self.backward_end_ms = 0.0

    def run(self, schedule: Schedule) -> None:
        """Play one step more."""
        in_slots = [move for move in self._moves if move.position < self._end]
        staged: list[tuple[int, int, Action | MoveAction]] = [(each.slot, 1, each) for each in schedule.actions]
        staged += [(move.position, 0 if move.kind in _MAKING_ROOM else 2, move) for move in in_slots]
        staged.sort(key=lambda each: each[:2])  # stable: keeps the order within a stage
        done = 0
        for slot, _, each in staged:
            if slot > done:
                self.run_ops(done, slot)
                done = slot
            self._move(each) if isinstance(each, MoveAction) else self.do(each)
        self.run_ops(done, self._end)
        self.reach_host()
        self.backward_end_ms = self.now_ms
        for move in self._moves[len(in_slots) :]:
            self._move(move)

    def _move(self, move: MoveAction) -> None:
        position, tensor = move.position, move.tensor
        if move.kind == "copy_out":
            self._out_ms[tensor] = self.copy("copy_out", "move", position, tensor, move.size_bytes)
        elif move.kind == "copy_in":
            self._in_ms[tensor] = self.copy("copy_in", "move", position, tensor, move.size_bytes)
        else:
            ends_ms = self._out_ms if move.kind == "free" else self._in_ms
            self.stall(position, -1, ends_ms.get(tensor, 0.0))
