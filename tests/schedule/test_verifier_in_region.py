"""What the verifier refuses of values that the program holds or writes over. Each forged schedule breaks one rule and
keeps all others, so that nothing else would find it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.errors import InvalidSchedule
from pooch.ir import Action, Choice, Profile, Schedule
from pooch.schedule import lower, verify
from tests import toys

SWAPPED: dict[int, Choice] = {1: "swap"}
RECOMPUTED: dict[int, Choice] = {1: "recompute"}
OUT, EMPTY, REFILL, WAIT = Action(1, "copy_out", 1), Action(2, "empty", 1), Action(3, "refill", 1), Action(3, "wait", 1)


def swapping(actions: Iterable[Action]) -> Schedule:
    """A schedule that swaps value 1."""
    return Schedule(tuple(actions), (), (), (1,), ((1, 0),), 4096)


def recomputing(*actions: Action, value: int = 1, sources: tuple[int, ...] = ()) -> Schedule:
    return Schedule(actions, sources, (value,), (), (), 0)


def holding(until: int, *, reader: int = 1, ops: int = 4) -> toys.ToyStep:
    """Op 0 makes value 1 and saves it, so that slot `2 * ops - 1` unpacks it; op `reader` reads it too; the program
    holds it through `until`.
    """
    step = toys.ToyStep()
    (held,) = step.op([step.external(8)], [100], saves_outputs=[0])
    current = held
    for index in range(1, ops):
        reads = dict.fromkeys([current, held] if index == reader else [current if index > 1 else 0])
        (current,) = step.op(list(reads), [10])
    step.hold(held, until=until)
    return step


def refused(profile: Profile, schedule: Schedule, decisions: dict[int, Choice], fault: str) -> None:
    with pytest.raises(InvalidSchedule, match=fault) as told:
        verify(Dataflow(profile), schedule, decisions, None)
    assert "\n" not in str(told.value)


def test_what_left_in_a_gap_and_is_back_in_time_is_accepted() -> None:
    dataflow = Dataflow(holding(until=5).build())
    points = verify(dataflow, swapping([OUT, EMPTY, REFILL, WAIT]), SWAPPED, None)
    assert min(points[4:6]) < dataflow.in_core_points[4] - 50  # so it was away


@pytest.mark.parametrize(
    ("missing", "later"),
    [
        ("refill", [Action(7, "free", 1), Action(7, "copy_in", 1), Action(7, "wait", 1)]),
        ("wait", [Action(7, "wait", 1)]),
    ],
)
def test_what_the_program_holds_is_back_when_the_region_ends(missing: str, later: list[Action]) -> None:
    """Nobody watches after slot 3, and the program holds the value through slot 5."""
    back = [REFILL] if missing == "wait" else []
    refused(
        holding(until=5).build(),
        swapping([OUT, EMPTY, *back, *later]),
        SWAPPED,
        "slot 3: value 1 is not back when the region ends, but the program still holds it",
    )


def test_a_recomputed_value_that_is_held_is_not_empty_when_the_region_ends() -> None:
    schedule = recomputing(EMPTY, Action(7, "replay", 0, (1,)))
    refused(holding(until=5).build(), schedule, RECOMPUTED, "value 1 is not back when the region ends")
    verify(Dataflow(holding(until=2).build()), schedule, RECOMPUTED, None)


@pytest.mark.parametrize("by", ["an op", "a touch"])
@pytest.mark.parametrize("state", ["emptied", "being filled"])
def test_what_the_forward_pass_looks_at_is_there(by: str, state: str) -> None:
    """Value 1 leaves for slots 2 and 3, and something looks at it in slot 2 (or, while it is filled, in slot 3)."""
    slot = 2 if state == "emptied" else 3
    step = holding(until=5, reader=slot if by == "an op" else 1, ops=5)
    if by == "a touch":
        step.touch(1, slot)
    actions = [OUT, EMPTY, REFILL, Action(4, "wait", 1)]
    fault = f"slot {slot}: the forward pass uses value 1, which is emptied or being refilled"
    refused(step.build(), swapping(actions), SWAPPED, fault)


def test_a_recomputed_value_is_not_looked_at_once_it_is_gone() -> None:
    step = holding(until=3, ops=5)
    step.touch(1, 3)
    schedule = recomputing(EMPTY, Action(9, "replay", 0, (1,)))
    refused(step.build(), schedule, RECOMPUTED, "slot 3: the forward pass uses value 1, which is emptied")


def test_what_may_be_looked_at_unseen_is_not_emptied() -> None:
    step = holding(until=5)
    step.hand_out(1)
    fault = "slot 2: empty of value 1, which may be read or overwritten unseen"
    refused(step.build(), swapping([OUT, EMPTY, REFILL, WAIT]), SWAPPED, fault)


def saved_twice() -> Profile:
    """Op 1 writes over value 1 in place, and autograd saves both what was there before and value 2, which comes of it.
    The program holds value 2 over op 3, which needs much room.
    """
    step = toys.ToyStep()
    (before,) = step.op([step.external(8)], [100], saves_outputs=[0])
    (after,) = step.op([before], [100], overwrites=before, saves_outputs=[0])
    (current,) = step.op([after], [10])
    (current,) = step.op([current], [10], workspace_bytes=500)
    (current,) = step.op([current, after], [10])
    step.op([current], [10])
    return step.build()


def test_a_storage_that_autograd_saved_before_it_was_written_over_is_not_emptied() -> None:
    dataflow = Dataflow(saved_twice())
    after = dataflow.profile.values[2]
    assert after.overwrites == 1
    assert dataflow.profile.values[1].saved
    assert not dataflow.can_empty(after)
    assert dataflow.gaps(after) == ()
    decided: dict[int, Choice] = {2: "swap"}
    assert "empty" not in {action.kind for action in lower(dataflow, decided, 1).actions}
    actions = Action(2, "copy_out", 2), Action(3, "empty", 2), Action(4, "refill", 2), Action(4, "wait", 2)
    forged = Schedule(actions, (), (), (2,), ((2, 0),), 4096)
    refused(dataflow.profile, forged, decided, "slot 3: empty of value 2, which may be read or overwritten unseen")


def test_a_storage_that_nobody_saved_before_it_was_written_over_is_emptied() -> None:
    profile = saved_twice()
    unsaved = replace(profile.values[1], saved=False)
    profile = replace(profile, values=(profile.values[0], unsaved, *profile.values[2:]))
    assert "empty" in {action.kind for action in lower(Dataflow(profile), {2: "swap"}, 1).actions}


def written_over() -> Profile:
    """Value 1 is written over by op 1, which makes value 2 of it; a file might claim that both can be decided on."""
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10], saves_outputs=[0])
    (second,) = step.op([first], [10], overwrites=first)
    (third,) = step.op([second], [10], saves=[second])
    step.op([third], [10], saves=[third])
    profile = step.build()
    claimed = replace(profile.values[first], fixed=None)
    return replace(profile, values=(profile.values[0], claimed, *profile.values[2:]))


@pytest.mark.parametrize("choice", ["swap", "recompute"])
def test_a_value_that_is_written_over_is_not_moved(choice: Choice) -> None:
    """Its bytes are another value's by the time that they would be copied back or made again."""
    if choice == "swap":
        moves = (Action(5, "free", 1), Action(7, "copy_in", 1), Action(7, "wait", 1))
        forged = swapping([OUT, *moves])
    else:
        forged = recomputing(Action(7, "replay", 0, (1,)))
    refused(written_over(), forged, {1: choice}, f"{choice} of value 1, which is overwritten in the step")


def test_a_value_that_is_written_over_is_not_held_for_replays() -> None:
    schedule = recomputing(Action(5, "replay", 1, (2,)), Action(5, "drop", 1), value=2, sources=(1,))
    refused(written_over(), schedule, {2: "recompute"}, "value 1 cannot be held as a source")
