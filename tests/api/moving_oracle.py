"""Tries everything on small steps: each decision on activations, with each choice of who is away when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.occupancy import occupancy
from pooch.analysis.persistence import Cycle, Residence, present_points, residence_of, with_resident
from pooch.api.evaluation import StageEvaluator
from pooch.ir import Choice, PersistentMove, Profile
from pooch.simulator import simulate_moving

Gap = tuple[int, int, int]  # of a tensor: the position that uses it, and the next one, which may be in the next step


def gaps_of(cycle: Cycle) -> list[Gap]:
    """All gaps with a position in which a tensor can be away."""
    found = []
    for number, (each, uses) in enumerate(zip(cycle.tensors, cycle.uses, strict=True)):
        for place, use in enumerate(uses):
            is_last = place + 1 == len(uses)
            following = uses[0] + cycle.count if is_last else uses[place + 1]
            if is_last and each.kind == "gradient":
                following = cycle.count  # where it ceases to be, wherever it is
            if following > use + 1:
                found.append((number, use, following))
    return found


def fastest_ms(profile: Profile, budget_bytes: int) -> float | None:
    """The shortest step that any of it leads to, or None if nothing fits.

    Of each choice of gaps, tensors leave as early or as late as they can, and come back at once or as early as there is
    room.
    """
    cycle, bare = Cycle(profile), Dataflow(with_resident(profile))
    best: float | None = None
    for chosen in _subsets(gaps_of(cycle)):
        away = present_points(profile).copy()
        for number, use, following in chosen:
            for position in range(use + 1, following):
                if position % cycle.count < bare.end:
                    slot = position % cycle.count
                    away[2 * slot : 2 * slot + 2] -= cycle.tensors[number].allocated_bytes
        resident = numpy.maximum(away, cycle.allowed_points(0))
        evaluator = StageEvaluator(Dataflow(with_resident(profile, resident)))
        for decisions in _decisions(evaluator.dataflow):
            evaluation = evaluator.evaluate(decisions, budget_bytes)
            if evaluation.timeline.peak_bytes > budget_bytes:
                continue
            schedule = evaluation.schedule
            others = occupancy(bare, schedule.actions, schedule.recomputed).point_bytes
            room_bytes = cycle.room_bytes(budget_bytes, others) - cycle.temporary_bytes
            for found in _placements(cycle, chosen, room_bytes):
                step_ms = simulate_moving(bare, schedule, found, detail=False).timeline.step_ms
                best = step_ms if best is None else min(best, step_ms)
    return best


def _subsets(gaps: Sequence[Gap]) -> Iterator[list[Gap]]:
    for mask in product([False, True], repeat=len(gaps)):
        yield [gap for gap, is_away in zip(gaps, mask, strict=True) if is_away]


def _decisions(dataflow: Dataflow) -> Iterator[dict[int, Choice]]:
    ids = [value.id for value in dataflow.activations]
    choices: tuple[Choice, ...] = ("keep", "swap", "recompute")
    for each in product(choices, repeat=len(ids)):
        decisions = dict(zip(ids, each, strict=True))
        if all(choice != "recompute" or dataflow.refusal(value) is None for value, choice in decisions.items()):
            yield decisions


def _placements(cycle: Cycle, chosen: Sequence[Gap], room_bytes: numpy.ndarray) -> Iterator[Residence]:
    for is_early, is_ahead in product([True, False], repeat=2):
        found = _placed(cycle, chosen, room_bytes, is_early=is_early, is_ahead=is_ahead)
        if (found.here_bytes <= room_bytes).all():
            yield found


def _placed(
    cycle: Cycle, chosen: Sequence[Gap], room_bytes: numpy.ndarray, *, is_early: bool, is_ahead: bool
) -> Residence:
    """The absences of some gaps. What does not have to leave early leaves where there would be no room for it."""
    count = cycle.count
    spans = [(number, use + 1, following) for number, use, following in chosen]
    here = _residence(cycle, spans).here_bytes
    if not is_early:
        for place, (number, leaves, need) in enumerate(spans):
            size_bytes = cycle.tensors[number].allocated_bytes
            while leaves + 1 < need and here[leaves % count] + size_bytes <= room_bytes[leaves % count]:
                here[leaves % count] += size_bytes
                leaves += 1
            spans[place] = (number, leaves, need)
    returns = [need for _, _, need in spans]
    if is_ahead:
        for place, (number, leaves, need) in sorted(enumerate(spans), key=lambda each: each[1][2]):
            if need == count and cycle.tensors[number].kind == "gradient":
                continue
            size_bytes = cycle.tensors[number].allocated_bytes
            back = need
            while back - 1 > leaves and here[(back - 1) % count] + size_bytes <= room_bytes[(back - 1) % count]:
                back -= 1
                here[back % count] += size_bytes
            returns[place] = back
    return _residence(cycle, spans, returns)


def _residence(cycle: Cycle, spans: Sequence[tuple[int, int, int]], returns: Sequence[int] | None = None) -> Residence:
    absences: dict[int, list[tuple[int, int, int]]] = {}
    for place, (number, leaves, need) in enumerate(spans):
        back = need if returns is None else returns[place]
        if need == cycle.count and cycle.tensors[number].kind == "gradient":
            absences.setdefault(number, []).append((leaves, -1, -1))
            continue
        absences.setdefault(number, []).append((leaves % cycle.count, back % cycle.count, need % cycle.count))
    moves = [
        PersistentMove(each.name, each.kind, each.size_bytes, tuple(absences[number]), int(each.is_written))
        for number, each in enumerate(cycle.tensors)
        if number in absences
    ]
    found = residence_of(cycle, moves)
    assert found is not None
    return found
