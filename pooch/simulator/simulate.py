"""Simulates a schedule on three streams (compute, copies out, copies in) and on the host that issues their work."""

from __future__ import annotations

from typing import Literal

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.occupancy import occupancy
from ..ir import Action, Interval, Schedule, Timeline
from ..ir.timeline import Stream
from .streams import Streams


def simulate(dataflow: Dataflow, schedule: Schedule, *, detail: bool = True) -> Timeline:
    """Predict time and memory of one step under a schedule (one that the verifier accepts).

    Args:
        dataflow: of the step.
        schedule: what to do.
        detail: also list what each stream does; otherwise only sums and curves (for searches).
    """
    play = Play(dataflow, detail)
    play.run(schedule)
    points = occupancy(dataflow, schedule.actions, schedule.recomputed).point_bytes
    return Timeline(
        step_ms=play.now_ms,
        stall_ms=play.stall_ms,
        replay_ms=play.replay_ms,
        peak_bytes=int(points.max(initial=0)),
        point_bytes=points,
        slot_start_ms=numpy.array([*play.slot_start_ms, play.now_ms]),
        host_bytes=schedule.host_bytes,
        intervals=tuple(play.intervals),
    )


def step_time_ms(dataflow: Dataflow, schedule: Schedule) -> float:
    """Predict the time alone, without an account of memory (for searches)."""
    play = Play(dataflow, detail=False)
    play.run(schedule)
    return play.now_ms


class Play:
    """The clocks of the compute stream and of the host, and when each copy ends.

    The host never waits for the device. Nothing on a stream starts before the host has issued all that comes before it;
    how long issuing it takes is part of its own measured time. On a CPU, where the host computes, its clock stands.
    """

    def __init__(self, dataflow: Dataflow, detail: bool) -> None:
        self._ops = dataflow.profile.ops
        self._values = dataflow.profile.values
        self._times_ms = dataflow.op_times_ms
        self._replay_times_ms = dataflow.replay_times_ms
        self._host_times_ms = dataflow.host_times_ms
        self._replay_host_times_ms = dataflow.replay_host_times_ms
        self._copy_begin_ms = dataflow.profile.hooks.copy_ms
        self._has_streams = dataflow.profile.device.has_streams
        self._streams = Streams(dataflow.profile.link)
        self._detail = detail
        self._out_end_ms: dict[int, float] = {}
        self._in_end_ms: dict[int, float] = {}
        self.now_ms = self.stall_ms = self.replay_ms = self._host_ms = 0.0
        self.slot_start_ms: list[float] = []
        self.intervals: list[Interval] = []

    def run(self, schedule: Schedule) -> None:
        """Play a step."""
        done = 0
        for action in schedule.actions:
            if action.slot > done:
                self.run_ops(done, action.slot)
                done = action.slot
            self.do(action)
        self.run_ops(done, len(self._times_ms))
        self.reach_host()

    def run_ops(self, begin: int, end: int) -> None:
        """Run the ops of some slots one after the other."""
        compute, starts, now_ms, host_ms = self._streams.compute, self.slot_start_ms, self.now_ms, self._host_ms
        for slot in range(begin, end):
            now_ms = max(now_ms, host_ms)
            starts.append(now_ms)
            now_ms = compute(now_ms, self._times_ms[slot])
            host_ms += self._host_times_ms[slot]
            if self._detail:
                self.intervals.append(Interval("compute", "op", slot, slot, starts[-1], now_ms))
        self.now_ms, self._host_ms = now_ms, host_ms

    def reach_host(self) -> None:
        """What comes next starts no earlier than the host issues it."""
        self.now_ms = max(self.now_ms, self._host_ms)

    def do(self, action: Action) -> None:
        """Do one thing at the entry of a slot."""
        kind, target = action.kind, action.target
        if kind == "replay":
            self.reach_host()
            start_ms = self.now_ms
            self.now_ms = self._streams.compute(start_ms, self._replay_times_ms[target])
            self._host_ms += self._replay_host_times_ms[target]
            self.replay_ms += self.now_ms - start_ms
            if self._detail:
                self.intervals.append(Interval("compute", "replay", action.slot, target, start_ms, self.now_ms))
        elif kind == "copy_out":
            self._out_end_ms[target] = self._copy_value("copy_out", action.slot, target)
        elif kind in ("copy_in", "refill"):
            self._in_end_ms[target] = self._copy_value("copy_in", action.slot, target)
        elif kind in ("free", "empty"):
            self.stall(action.slot, target, self._out_end_ms.get(target, 0.0))
        elif kind == "wait":
            self.stall(action.slot, target, self._in_end_ms.get(target, 0.0))

    def _begin_copy(self) -> None:
        """The host issues the copy after the compute before it."""
        if self._has_streams:
            self._host_ms += self._copy_begin_ms
            self.reach_host()
        elif self._copy_begin_ms > 0:
            self.now_ms = self._streams.compute(self.now_ms, self._copy_begin_ms)

    def _copy_value(self, stream: Stream, slot: int, target: int) -> float:
        value = self._values[target]
        return self.copy(stream, "copy", slot, target, value.size_bytes, packs=value.packs)

    def copy(
        self,
        stream: Stream,
        kind: Literal["copy", "move"],
        slot: int,
        target: int,
        size_bytes: int,
        *,
        packs: bool = False,
    ) -> float:
        """Begin a copy, and return when it ends. The arguments are those of its `Interval`, and what it copies."""
        self._begin_copy()
        issue = self._streams.copy_out if stream == "copy_out" else self._streams.copy_in
        span = issue(self.now_ms, size_bytes, packs=packs)
        if self._detail:
            self.intervals.append(Interval(stream, kind, slot, target, *span))
        return span[1]

    def stall(self, slot: int, target: int, until_ms: float) -> None:
        """Wait until a copy of the target has ended."""
        if until_ms <= self.now_ms:
            return
        if self._detail:
            self.intervals.append(Interval("compute", "stall", slot, target, self.now_ms, until_ms))
        self.stall_ms += until_ms - self.now_ms
        self.now_ms = until_ms
