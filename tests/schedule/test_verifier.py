"""Every fault that the verifier knows, made on purpose in a schedule that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.errors import InvalidSchedule
from pooch.ir import Action, Choice, Schedule
from pooch.schedule import lower, verify
from tests import toys

DECIDED: dict[int, Choice] = {1: "swap", 2: "recompute", 3: "recompute", 4: "swap"}
Edit = Callable[[list[Action]], list[Action]]


@pytest.fixture(scope="module")
def dataflow() -> Dataflow:
    return Dataflow(toys.chain(6, size_bytes=10))  # values 1 to 6, backward slots 6 to 11, value 5 is kept


@pytest.fixture(scope="module")
def schedule(dataflow: Dataflow) -> Schedule:
    made = lower(dataflow, DECIDED, 1)
    assert [f"{a.slot} {a.kind} {a.target}" for a in made.actions] == [
        "1 copy_out 1",
        "2 free 1",
        "4 copy_out 4",
        "5 free 4",
        "7 copy_in 4",
        "7 wait 4",
        "8 copy_in 1",
        "8 wait 1",
        "8 replay 1",
        "8 drop 1",
        "8 replay 2",
        "8 drop 2",
    ]
    verify(dataflow, made, DECIDED, 60)
    return made


def omit(place: int) -> Edit:
    return lambda actions: [action for index, action in enumerate(actions) if index != place]


def exchange(place: int, other: int) -> Edit:
    def edit(actions: list[Action]) -> list[Action]:
        actions[place], actions[other] = actions[other], actions[place]
        return actions

    return edit


def at(place: int, **fields: object) -> Edit:
    return lambda actions: [replace(a, **fields) if i == place else a for i, a in enumerate(actions)]


def insert(place: int, *new: Action) -> Edit:
    return lambda actions: [*actions[:place], *new, *actions[place:]]


FAULTS: dict[str, Edit] = {
    "slot 2: free of value 1, which is here by then": omit(0),
    "slot 8: copy_in of value 1, which is copied by then": omit(1),
    "slot 7: wait of value 4, which is away by then": omit(4),
    "slot 7: value 4 is unpacked but not present": omit(5),
    "slot 8: replay of op 1 reads value 1, which is swapped and not back": omit(7),
    "slot 8: replay of op 2 reads value 2, which is recomputed but not on the device": omit(8),
    "slot 8: value 3 is unpacked but not present": omit(10),
    "slot 8: replay of op 1 reads value 1": exchange(7, 8),
    "slot 1: copy_out of value 1, which is copied by then": insert(1, Action(1, "copy_out", 1)),
    "slot 2: free of value 1, which is away by then": insert(2, Action(2, "free", 1)),
    "slot 1: free of value 1, which the program holds through slot 1": at(1, slot=1),
    "slot 0: copy_out of value 1, which is not made by then": at(0, slot=0),
    "slot 8: free of value 4 after its first unpack": lambda a: [*a[:3], replace(a[3], slot=8), *a[6:]],
    "slot 8: drop of value 2, which the schedule does not hold": insert(12, Action(8, "drop", 2)),
    "slot 8: replay of op 1 makes value 2 for the second time": insert(9, Action(8, "replay", 1, (2,))),
    "slot 8: replay of op 1 must not overwrite value 1": at(8, in_place=(1,)),
    "slot 8: replay of op 0 makes value 1, which is present": insert(12, Action(8, "replay", 0, (1,))),
    "slot 7: replayed intermediate 5 is not dropped": insert(6, Action(7, "replay", 4, (5,))),
    "slot 7: replay of op 4 makes value 5, which is present": insert(
        6, Action(7, "replay", 4, (5,)), Action(7, "replay", 4, (5,))
    ),
    "slot 9: replay of op 4 reads value 4, which is swapped and not back": insert(12, Action(9, "replay", 4, (5,))),
    "slot 8: replay of op 5 reads value 5, which is neither held": insert(12, Action(8, "replay", 5)),
    "replay of op 6, which is no op of the region": insert(12, Action(8, "replay", 6)),
    "replay of op 2 keeps what it does not write": at(10, outputs=(3, 4)),
    "wait of value 5, which is not swapped": insert(12, Action(8, "wait", 5)),
    "drop of 2 is at slot 11, where no schedule can act": at(11, slot=11),
    "copy_in of 4 is at slot 5, where no schedule can act": at(4, slot=5),
    "its actions are not in ascending order of slots": at(8, slot=7),
    "value 1 is swapped and never freed": lambda a: [a[2], a[3], a[4], a[5]],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_in_one_line(fault: str, dataflow: Dataflow, schedule: Schedule):
    recomputed = schedule.recomputed if "never freed" not in fault else ()
    broken = replace(schedule, actions=tuple(FAULTS[fault](list(schedule.actions))), recomputed=recomputed)
    assert broken != schedule
    with pytest.raises(InvalidSchedule, match=fault) as told:
        verify(dataflow, broken, DECIDED, None)
    assert "\n" not in str(told.value)


def test_a_source_that_is_never_dropped_is_a_leak(dataflow: Dataflow):
    schedule = lower(dataflow, {2: "recompute"}, 1)
    assert schedule.actions[-1] == Action(9, "drop", 1)
    with pytest.raises(InvalidSchedule, match="value 1 is held for replays and never dropped"):
        verify(dataflow, replace(schedule, actions=schedule.actions[:-1]), {2: "recompute"}, None)
    with pytest.raises(InvalidSchedule, match="value 1, which is neither held as a source nor brought back"):
        verify(dataflow, replace(schedule, sources=()), {2: "recompute"}, None)
    early = (schedule.actions[1], schedule.actions[0])
    with pytest.raises(InvalidSchedule, match="value 1, which was dropped before"):
        verify(dataflow, replace(schedule, actions=early), {2: "recompute"}, None)


def test_the_budget_holds_at_every_point(dataflow: Dataflow, schedule: Schedule):
    peak = max(verify(dataflow, schedule, DECIDED, None))
    assert verify(dataflow, schedule, DECIDED, peak)
    with pytest.raises(InvalidSchedule, match=rf"takes {peak} bytes, over the budget of {peak - 1}"):
        verify(dataflow, schedule, DECIDED, peak - 1)


def test_nothing_is_moved_that_was_not_decided_on(dataflow: Dataflow, schedule: Schedule):
    with pytest.raises(InvalidSchedule, match="swap of value 1, for which 'keep' was decided"):
        verify(dataflow, schedule, {**DECIDED, 1: "keep"}, None)
    with pytest.raises(InvalidSchedule, match="recompute of value 2, for which 'swap' was decided"):
        verify(dataflow, schedule, {**DECIDED, 2: "swap"}, None)
    with pytest.raises(InvalidSchedule, match="value 1 cannot be held as a source"):
        verify(dataflow, replace(schedule, sources=(1,)), DECIDED, None)


def test_swapped_values_have_room_of_their_own(dataflow: Dataflow, schedule: Schedule):
    for offsets, fault in (
        (((1, 0), (4, 0)), "values 1 and 4 overlap"),
        (((1, 0), (4, 4097)), "value 4 lies outside the tier"),
        (((1, 0), (4, 9)), "value 4 lies at 9 in the tier, which is no multiple of 4096"),
        (((1, 0),), "the tier's layout is not that of the swapped values"),
    ):
        with pytest.raises(InvalidSchedule, match=fault):
            verify(dataflow, replace(schedule, host_offsets=offsets), DECIDED, None)


def test_an_op_that_refuses_is_not_replayed():
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10], refusal="it talks to others")
    step.op([first], [10], saves=[first])
    forged = Schedule((Action(2, "replay", 0, (1,)),), (), (1,), (), (), 0)
    with pytest.raises(InvalidSchedule, match="replay of op 0: it talks to others"):
        verify(Dataflow(step.build()), forged, {1: "recompute"}, None)


def test_a_value_is_not_freed_between_its_unpacks():
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10])
    (second,) = step.op([first], [10], saves=[first])
    (third,) = step.op([second], [10], saves=[second])
    step.op([third, first], [10], saves=[first])
    dataflow = Dataflow(step.build())  # value 1 is unpacked in slots 4 and 6, value 2 in slot 5
    actions = (Action(1, "copy_out", 1), Action(5, "free", 1))
    forged = Schedule(actions, (), (), (1,), ((1, 0),), 4096)
    with pytest.raises(InvalidSchedule, match="slot 5: free of value 1 after its first unpack"):
        verify(dataflow, forged, {1: "swap"}, None)


def test_a_value_that_no_unpack_reads_is_neither_freed_nor_copied_out_after_its_death():
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10])
    (second,) = step.op([first], [10], saves=[first])
    step.op([second], [10], saves=[second])
    made = step.build()  # value 1 is unpacked in slot 4, and dies there
    unread = (*made.values[:1], replace(made.values[1], first_unpack=-1, death=3), *made.values[2:])
    dataflow = Dataflow(replace(made, values=unread, anchors=((3, (2,)), (4, ()), (5, ()))))
    for out, fault in (
        (1, "slot 4: free of value 1 after its death in slot 3"),
        (4, "slot 4: copy out of value 1, which is not on the device"),
    ):
        forged = Schedule((Action(out, "copy_out", 1), Action(4, "free", 1)), (), (), (1,), ((1, 0),), 4096)
        with pytest.raises(InvalidSchedule, match=fault):
            verify(dataflow, forged, {1: "swap"}, None)
