"""Lowers decisions to a schedule. The rules are stated in docs/schedule.md; nothing here looks at times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from pooch.errors import UsageError
from pooch.ir import Action, Choice, Decisions, Schedule
from pooch.ir.dataflow import Dataflow
from pooch.ir.occupancy import occupancy
from pooch.schedule.replays import Replays, ReplayTables, plan_replays
from pooch.schedule.swaps import Swap, SwapTables, place_swaps

HOST_ALIGNMENT_BYTES = 4096


def lower(dataflow: Dataflow, decisions: Decisions, budget_bytes: int) -> Schedule:
    """Lower decisions once; see `Lowering` for many times on one dataflow."""
    return Lowering(dataflow).lower(decisions, budget_bytes)


class Lowering:
    """Turns decisions into schedules of one dataflow; what follows from the dataflow alone is worked out once."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._replay_tables = ReplayTables(dataflow)
        self._swap_tables = SwapTables(dataflow)
        # A value that is written over later cannot be brought back to what autograd saw: it stays.
        self._decidable = frozenset(v.id for v in dataflow.activations if dataflow.is_source(v))

    def lower(self, decisions: Decisions, budget_bytes: int) -> Schedule:
        """Lower decisions; activations not named are kept.

        The budget says when values leave and come back; where the decisions do not fit into it, the schedule
        does what it can and its simulated peak is over the budget. A swapped value for which there is always room, or
        that cannot leave before it is needed, is kept: it is not in `Schedule.swapped`.

        Raises:
            UsageError: a decision names no activation, or asks for an impossible recompute.
        """
        self._check(decisions)
        decided = {value: choice for value, choice in decisions.items() if value in self._decidable}
        replays = plan_replays(self._replay_tables, decided)
        swaps = self._place_swaps(decided, replays, budget_bytes)
        actions = _assemble(swaps, replays)
        return self._schedule(actions, swaps, replays)

    def _check(self, decisions: Decisions) -> None:
        for value, choice in decisions.items():
            if value not in self.dataflow.activation_ids:
                raise UsageError(f"decision {choice!r} for value {value}, which is no activation of this profile")
            if choice == "recompute" and value not in self._replay_tables.recipes:
                refusal = self.dataflow.refusal(value)
                raise UsageError(f"value {value} cannot be recomputed: {refusal}; keep or swap it")

    def _place_swaps(self, decided: dict[int, Choice], replays: Replays, budget_bytes: int) -> list[Swap]:
        tables = self._swap_tables
        wanted = [value for value, choice in decided.items() if choice == "swap"]
        possible = (tables.candidate(value, replays.needs.get(value)) for value in sorted(wanted))
        candidates = [swap for swap in possible if swap is not None]
        if not candidates:
            return []
        replayed = (action for slot in replays.actions for action in replays.actions[slot])
        memory = occupancy(self.dataflow, replayed, replays.recomputed)
        return sorted(place_swaps(tables, candidates, memory, budget_bytes), key=lambda swap: swap.value)

    def _schedule(self, actions: tuple[Action, ...], swaps: list[Swap], replays: Replays) -> Schedule:
        swapped = tuple(swap.value for swap in swaps)
        sources = replays.reads.difference(swapped, replays.recomputed)
        offsets, host_bytes = self._host_layout(swapped)
        return Schedule(actions, tuple(sorted(sources)), replays.recomputed, swapped, offsets, host_bytes)

    def _host_layout(self, swapped: Iterable[int]) -> tuple[tuple[tuple[int, int], ...], int]:
        """One after the other, aligned; no room is used twice, so that no copy has to wait for another."""
        offsets, top = [], 0
        for value in swapped:
            offsets.append((value, top))
            size_bytes = self.dataflow.profile.values[value].size_bytes
            top += -(-size_bytes // HOST_ALIGNMENT_BYTES) * HOST_ALIGNMENT_BYTES
        return tuple(offsets), top


def _assemble(swaps: list[Swap], replays: Replays) -> tuple[Action, ...]:
    """Order within one entry: copies out, frees, copies in that are needed here, then waits, replays and drops, copies
    in that are needed later (so that they do not add to the replays' peak), waits for what is unpacked here.
    """
    stages: dict[int, list[list[Action]]] = defaultdict(lambda: [[], [], [], [], [], []])
    moved = {swap.value for swap in swaps}
    for swap in sorted(swaps, key=lambda s: (s.need_slot is None, s.need_slot)):
        _stage_swap(swap, replays, stages)
    for slot, actions in replays.actions.items():
        stages[slot][3] = [action for action in actions if action.kind != "wait" or action.target in moved]
    ordered: list[Action] = []
    for slot in sorted(stages):
        copies_out, frees = stages[slot][:2]
        copies_out.sort(key=lambda action: action.target)
        frees.sort(key=lambda action: action.target)
        for stage in stages[slot]:
            ordered += stage
    return tuple(ordered)


def _stage_swap(swap: Swap, replays: Replays, stages: dict[int, list[list[Action]]]) -> None:
    stages[swap.copy_slot][0].append(Action(swap.copy_slot, "copy_out", swap.value))
    stages[swap.free_slot][1].append(Action(swap.free_slot, "free", swap.value))
    if swap.need_slot is None:
        return
    stage = 2 if swap.in_slot == swap.need_slot else 4
    stages[swap.in_slot][stage].append(Action(swap.in_slot, "copy_in", swap.value))
    if swap.value not in replays.waited:
        stages[swap.need_slot][5].append(Action(swap.need_slot, "wait", swap.value))
