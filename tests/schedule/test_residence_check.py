"""The check of who is away when finds what would go wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.analysis.persistence import Absence, Cycle, Residence, residence, with_resident
from pooch.errors import InvalidSchedule
from pooch.ir.schedule import Schedule
from pooch.schedule import verify_residence
from pooch.simulator import simulate_moving
from tests.persistent_toys import layered, with_tensors
from tests.toys import chain

NOTHING = Schedule((), (), (), (), (), 0)


def tight() -> tuple[Residence, int]:
    """Everything leaves that can, and the budget of that."""
    profile = with_tensors(chain(4), layered(4))
    cycle = Cycle(profile)
    found = residence(cycle, cycle.need_bytes + cycle.temporary_bytes)
    assert found is not None
    return found, checked(found, 2**40)


def checked(found: Residence, budget_bytes: int) -> int:
    timeline = simulate_moving(Dataflow(with_resident(found.cycle.profile)), NOTHING, found).timeline
    verify_residence(found, timeline, budget_bytes)
    return timeline.peak_bytes


def shifted(found: Residence, place: int, **changes: int) -> Residence:
    absences = list(found.absences)
    absences[place] = replace(absences[place], **changes)
    return replace(found, absences=tuple(absences))


def test_what_is_right_passes() -> None:
    found, peak_bytes = tight()
    assert checked(found, peak_bytes) == peak_bytes


def test_a_tensor_that_is_away_when_it_is_used() -> None:
    found, _ = tight()
    last = found.cycle.count - 1
    place = next(n for n, each in enumerate(found.absences) if 0 <= each.leaves < each.need < last)
    late = found.absences[place].need + 1
    with pytest.raises(InvalidSchedule, match="which uses it"):
        checked(shifted(found, place, returns=late), 2**40)


def test_a_tensor_that_leaves_while_it_is_away() -> None:
    found, _ = tight()
    double = replace(found, absences=(*found.absences, found.absences[0]))
    with pytest.raises(InvalidSchedule, match="leaves while it is away"):
        checked(double, 2**40)


def test_other_bytes_than_promised() -> None:
    found, _ = tight()
    fewer = found.here_bytes.copy()
    fewer[1] -= 1
    with pytest.raises(InvalidSchedule, match="at position 1, not"):
        checked(replace(found, here_bytes=fewer), 2**40)


def test_a_budget_that_is_passed() -> None:
    found, peak_bytes = tight()
    with pytest.raises(InvalidSchedule, match="more than the budget"):
        checked(found, peak_bytes - 1)


def test_a_gradient_that_nothing_uses_again_does_not_come_back() -> None:
    found, _ = tight()
    gradient = next(n for n, each in enumerate(found.cycle.tensors) if each.kind == "gradient")
    last = found.cycle.uses[gradient][-1]
    if last + 1 < found.cycle.count and all(each.tensor != gradient or each.returns >= 0 for each in found.absences):
        here = found.here_bytes - numpy.where(
            numpy.arange(found.cycle.count) > last, found.cycle.tensors[gradient].allocated_bytes, 0
        )
        ended = Absence(gradient, last + 1, -1, -1)
        checked(replace(found, absences=(*found.absences, ended), here_bytes=here), 2**40)
