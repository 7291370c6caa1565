"""Lowers decisions to a schedule. The rules are stated in docs/schedule.md; nothing here looks at times."""

from __future__ import annotations

from operator import itemgetter

from pooch.errors import UsageError
from pooch.ir import Action, Choice, Decisions, Schedule
from pooch.ir.dataflow import Dataflow
from pooch.ir.occupancy import occupancy
from pooch.schedule.actions import action
from pooch.schedule.host_layout import lay_out
from pooch.schedule.replays import Replays, ReplayTables, plan_replays
from pooch.schedule.swaps import Swap, SwapTables, place_swaps


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
        wanted = sorted(value for value, choice in decided.items() if choice == "swap")
        possible = (tables.candidate(value, replays.needs.get(value, -1)) for value in wanted)
        candidates = [candidate for candidate in possible if candidate is not None]
        if not candidates:
            return []
        replayed = (done for slot in replays.actions for done in replays.actions[slot])
        memory = occupancy(self.dataflow, replayed, replays.recomputed)
        return place_swaps(tables, candidates, memory, budget_bytes)

    def _schedule(self, actions: tuple[Action, ...], swaps: list[Swap], replays: Replays) -> Schedule:
        swapped = tuple(sorted(swap.candidate.value for swap in swaps))
        sources = replays.reads.difference(swapped, replays.recomputed)
        layout = lay_out(actions, swapped, self._swap_tables.size_bytes)
        return Schedule(actions, tuple(sorted(sources)), replays.recomputed, swapped, layout.offsets, layout.host_bytes)


def _assemble(swaps: list[Swap], replays: Replays) -> tuple[Action, ...]:
    """Put all actions in order of slot and stage.

    The stages of one entry: 0 copies out, 1 frees, 2 copies in that are needed here, 3 replays with their drops and
    the waits for what they read, 4 copies in that are needed later (after the replays, so as not to add to their
    peak), 5 waits for what is unpacked here.
    """
    staged: list[tuple[int, Action]] = []
    for swap in sorted(swaps, key=lambda swap: swap.candidate.value):  # copies and frees: first made, first out
        staged += _way_out(swap)
    for swap in swaps:  # in order of need
        if swap.in_slot >= 0:
            staged += _way_in(swap, replays)
    moved = {swap.candidate.value for swap in swaps}
    for slot, actions in replays.actions.items():
        staged += [(slot * 6 + 3, a) for a in actions if a.kind != "wait" or a.target in moved]
    staged.sort(key=itemgetter(0))  # stable: within a stage, as gathered
    return tuple(action for _, action in staged)


def _way_out(swap: Swap) -> tuple[tuple[int, Action], tuple[int, Action]]:
    value, copy_slot = swap.candidate.value, swap.candidate.copy_slot
    copy = action(copy_slot, "copy_out", value)
    return (copy_slot * 6, copy), (swap.free_slot * 6 + 1, action(swap.free_slot, "free", value))


def _way_in(swap: Swap, replays: Replays) -> list[tuple[int, Action]]:
    value, need_slot = swap.candidate.value, swap.candidate.need_slot
    stage = 2 if swap.in_slot == need_slot else 4
    staged = [(swap.in_slot * 6 + stage, action(swap.in_slot, "copy_in", value))]
    if value not in replays.waited:
        staged.append((need_slot * 6 + 5, action(need_slot, "wait", value)))
    return staged
