"""Lowers decisions to a schedule by the rules of docs/schedule.md. Times play no role."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter, itemgetter

import numpy

from ..analysis.dataflow import Dataflow
from ..analysis.occupancy import Occupancy, occupancy, others_change
from ..ground.errors import UsageError
from ..ir import Action, Choice, Decisions, Schedule
from ..ir.schedule import ActionKind
from .host_layout import lay_out
from .replays import Replays, ReplayTables, action, plan_replays
from .swaps import Absence, AwayWindow, SwapTables, place_absences


def lower(dataflow: Dataflow, decisions: Decisions, budget_bytes: int | numpy.ndarray) -> Schedule:
    """Lower decisions once. To lower repeatedly on one dataflow, use `Lowering`."""
    return Lowering(dataflow).lower(decisions, budget_bytes)


class Lowering:
    """Lowers decisions to schedules of one dataflow, using tables that are prepared once."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._replay_tables = ReplayTables(dataflow)
        self._swap_tables = SwapTables(dataflow)
        # A value that is overwritten later cannot be restored to what autograd saved, so it stays.
        self._decidable = frozenset(v.id for v in dataflow.activations if dataflow.is_source(v))

    def lower(self, decisions: Decisions, budget_bytes: int | numpy.ndarray) -> Schedule:
        """Lower decisions; activations not named are kept.

        The budget determines when values leave and come back. If the decisions do not fit, the schedule comes as close
        as it can, and its simulated peak exceeds the budget. A swapped value for which there is always room, or that
        cannot leave before it is needed, is kept: it is not in `Schedule.swapped`.

        Args:
            decisions: the choice for each activation.
            budget_bytes: bound on all device bytes: one number, or an int64 array of shape (2 * ops,) with one for each
                point of the step.

        Raises:
            UsageError: a decision is not about an activation, or recomputes a value that cannot be recomputed.
        """
        self._check(decisions)
        decided = {value: choice for value, choice in decisions.items() if value in self._decidable}
        replays = plan_replays(self._replay_tables, decided)
        absences = self._place_absences(decided, replays, budget_bytes)
        actions = _assemble(absences, replays)
        return self._schedule(actions, absences, replays)

    def _check(self, decisions: Decisions) -> None:
        for value, choice in decisions.items():
            if value not in self.dataflow.activation_ids:
                raise UsageError(f"decision {choice!r} for value {value}, which is not an activation of this profile")
            if choice == "recompute" and value not in self._replay_tables.recipes:
                refusal = self.dataflow.refusal(value)
                raise UsageError(f"value {value} cannot be recomputed: {refusal}; keep or swap it{self._maker(value)}")

    def _maker(self, value: int) -> str:
        """Returns the operator that makes a value and the module that calls it, for people."""
        producer = self.dataflow.profile.values[value].producer
        if producer < 0:
            return ""
        op = self.dataflow.profile.ops[producer]
        place = f"module {op.module!r}" if op.module else "the model's own forward"
        return f" (it is made by {op.name} in {place})"

    def _place_absences(
        self, decided: dict[int, Choice], replays: Replays, budget_bytes: int | numpy.ndarray
    ) -> list[Absence]:
        tables = self._swap_tables
        windows = [window for value in replays.recomputed for window in tables.recomputed(value)]
        for value, choice in decided.items():
            if choice == "swap":
                windows += tables.swapped(value, replays.needs.get(value, -1))
        if not windows:
            return []
        replayed = (done for slot in replays.actions for done in replays.actions[slot])
        memory = occupancy(self.dataflow, replayed, replays.recomputed)
        if self.dataflow.profile.in_flight.microbatches > 1:
            if not (memory.point_bytes > budget_bytes).any():
                return []
            memory, budget_bytes = self._without_others(windows, memory, budget_bytes)
        return place_absences(tables, windows, memory, budget_bytes)

    def _without_others(
        self, windows: list[AwayWindow], memory: Occupancy, budget_bytes: int | numpy.ndarray
    ) -> tuple[Occupancy, numpy.ndarray]:
        """Let what is swapped leave before the forward pass ends, since the others in flight hold what has not left.

        Returns:
            The memory once it has left in the others, and budgets under which it leaves in this microbatch too.
        """
        last = self.dataflow.forward_slots.stop - 1
        turn = 2 * self.dataflow.profile.forward_ops
        alive = (w for w in windows if w.back_point >= turn and self._swap_tables.life_ends[w.value] > turn)
        leaving = (w for w in alive if w.kind == "swap" and w.ready_slot <= last)
        resident_bytes = memory.resident_bytes - sum(window.bytes for window in leaving)
        points = memory.point_bytes - others_change(self.dataflow, memory.resident_bytes)
        points += others_change(self.dataflow, resident_bytes)
        budgets = numpy.array(numpy.broadcast_to(budget_bytes, points.shape))
        budgets[2 * last + 1] = -1  # nothing is read or comes back between here and the first anchor
        return Occupancy(points, memory.entry_excess_bytes, resident_bytes), budgets

    def _schedule(self, actions: tuple[Action, ...], absences: list[Absence], replays: Replays) -> Schedule:
        swapped = tuple(sorted({a.window.value for a in absences if a.window.kind != "recompute"}))
        away_in_backward = (a.window.value for a in absences if a.window.kind == "swap")
        sources = replays.reads.difference(away_in_backward, replays.recomputed)
        offsets, host_bytes = lay_out(actions, swapped, self._swap_tables.size_bytes)
        return Schedule(actions, tuple(sorted(sources)), replays.recomputed, swapped, offsets, host_bytes)


def _assemble(absences: list[Absence], replays: Replays) -> tuple[Action, ...]:
    """Sort all actions by slot and stage.

    The stages of an entry are: 0 copies out, 1 frees, 2 copies in that are needed here, 3 replays with their drops and
    the waits for what they read, 4 copies in that are needed later (after the replays, so as not to add to their
    peak), 5 waits for what is read here.
    """
    staged: list[tuple[int, Action]] = []
    copied: set[int] = set()
    for absence in sorted(absences, key=attrgetter("window.value")):  # copies and frees, as values are made
        staged += _way_out(absence, copied)
    for absence in absences:  # in order of need
        if absence.in_slot >= 0:
            staged += _way_in(absence, replays)
    moved = {absence.window.value for absence in absences if absence.window.kind == "swap"}
    for slot, actions in replays.actions.items():
        staged += [(slot * 6 + 3, a) for a in actions if a.kind != "wait" or a.target in moved]
    staged.sort(key=itemgetter(0))  # stable: keeps the order within a stage
    return tuple(action for _, action in staged)


def _way_out(absence: Absence, copied: set[int]) -> Iterator[tuple[int, Action]]:
    """Copy a value out once, however often it leaves; while the program holds it, it is emptied, and freed later."""
    window, slot = absence.window, absence.out_slot
    value = window.value
    if window.kind != "recompute" and value not in copied:
        copied.add(value)
        yield window.copy_slot * 6, action(window.copy_slot, "copy_out", value)
    if slot < window.let_go_slot:
        yield slot * 6 + 1, action(slot, "empty", value)
    if window.kind == "swap":
        free_slot = max(slot, window.let_go_slot)
        yield free_slot * 6 + 1, action(free_slot, "free", value)


def _way_in(absence: Absence, replays: Replays) -> Iterator[tuple[int, Action]]:
    window, slot = absence.window, absence.in_slot
    value, need_slot = window.value, window.need_slot
    kind: ActionKind = "refill" if window.kind == "gap" else "copy_in"
    yield slot * 6 + (2 if slot == need_slot else 4), action(slot, kind, value)
    if kind == "refill" or value not in replays.waited:
        yield need_slot * 6 + 5, action(need_slot, "wait", value)
