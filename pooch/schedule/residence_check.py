"""Checks that what outlives the step is there whenever it is used, and that its bytes stay within the budget.

It counts by itself: position by position, from the absences alone.
"""

from __future__ import annotations

from ..analysis.persistence import Residence, stretches
from ..ground.errors import InvalidSchedule
from ..ground.units import format_bytes
from ..ir import Timeline


def verify_residence(residence: Residence, timeline: Timeline, budget_bytes: int) -> None:
    """Check who is away when against the uses of each tensor, and the bytes against the budget.

    Args:
        residence: who is away when.
        timeline: of the whole step, as it was predicted.
        budget_bytes: of everything.

    Raises:
        InvalidSchedule: a tensor is away when it is used, or returns before it leaves; or the bytes exceed the budget,
            or are others than predicted.
    """
    cycle = residence.cycle
    here = [0] * cycle.count
    every = range(cycle.count)
    absent: dict[int, set[int]] = {number: set(every) for number in residence.gone}
    for absence in residence.absences:
        positions = {position for stretch in stretches(absence, cycle.count) for position in every[stretch]}
        others = absent.setdefault(absence.tensor, set())
        if others & positions:
            raise InvalidSchedule(f"{_named(residence, absence.tensor)} leaves while it is away")
        others |= positions
    for number, each in enumerate(cycle.tensors):
        gone = absent.get(number, set())
        for use in cycle.uses[number]:
            if use in gone:
                raise InvalidSchedule(f"{_named(residence, number)} is away at position {use}, which uses it")
        for position in range(cycle.born(number), cycle.count):
            if position not in gone:
                here[position] += each.allocated_bytes
    for position, (counted, said) in enumerate(zip(here, residence.here_bytes.tolist(), strict=True)):
        if counted != said:
            raise InvalidSchedule(
                f"{counted} bytes of what outlives the step are there at position {position}, not {said}"
            )
    if timeline.peak_bytes > budget_bytes:
        over = format_bytes(timeline.peak_bytes - budget_bytes)
        raise InvalidSchedule(f"the step takes {over} more than the budget of {format_bytes(budget_bytes)}")


def _named(residence: Residence, tensor: int) -> str:
    each = residence.cycle.tensors[tensor]
    return f"the {each.kind} {each.name!r}" if each.kind == "parameter" else f"the {each.kind} of {each.name!r}"
