"""The rules of docs/schedule.md, one example each, with the exact order of actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from pooch.analysis.dataflow import Dataflow
from pooch.errors import UsageError
from pooch.ir import Action, Choice, Profile, Schedule
from pooch.schedule import lower, verify
from pooch.simulator import simulate
from tests import toys
from tests.schedule.interpreter import run_schedule

ROOMY = 1 << 60


def lowered(profile: Profile, decided: Mapping[int, Choice], budget_bytes: int) -> Schedule:
    """Lower, and hold the result against verifier, simulator and interpreter."""
    dataflow = Dataflow(profile)
    schedule = lower(dataflow, decided, budget_bytes)
    points = verify(dataflow, schedule, decided, None)
    assert simulate(dataflow, schedule).point_bytes.tolist() == points
    assert run_schedule(dataflow, schedule).points == points
    return schedule


def told(schedule: Schedule) -> list[str]:
    """Actions as "slot kind target", with what a replay keeps and writes over."""
    lines = []
    for action in schedule.actions:
        line = f"{action.slot} {action.kind} {action.target}"
        line += f" keeps {list(action.outputs)}" if action.outputs else ""
        line += f" over {list(action.in_place)}" if action.in_place else ""
        lines.append(line)
    return lines


def test_a_swapped_value_leaves_as_late_and_returns_as_early_as_memory_permits():
    profile = toys.chain(5, size_bytes=10)  # values 1..5; 1 to 4 are saved; backward slots 5 to 9
    decided = {1: "swap", 2: "swap", 3: "swap"}
    assert told(lowered(profile, decided, 40)) == [
        "1 copy_out 1",
        "2 copy_out 2",
        "3 free 1",
        "4 free 2",
        "5 copy_in 2",
        "6 copy_in 1",
        "7 wait 2",
        "8 wait 1",
    ]


def test_the_tightest_budget_frees_at_once_and_copies_in_at_need():
    profile = toys.chain(5, size_bytes=10)
    decided = {1: "swap", 2: "swap"}
    assert told(lowered(profile, decided, 1)) == [
        "1 copy_out 1",
        "2 copy_out 2",
        "2 free 1",
        "3 free 2",
        "7 copy_in 2",
        "7 wait 2",
        "8 copy_in 1",
        "8 wait 1",
    ]


def test_a_swapped_value_for_which_there_is_always_room_is_kept():
    profile = toys.chain(5, size_bytes=10)
    schedule = lowered(profile, {1: "swap", 2: "swap"}, profile.peak_bytes)
    assert (schedule.actions, schedule.swapped, schedule.host_bytes) == ((), (), 0)
    assert lowered(profile, {1: "swap", 2: "swap"}, profile.peak_bytes - 1).swapped == (1,)


def test_recomputed_sources_are_replayed_first_and_stay():
    profile = toys.chain(5, size_bytes=10)
    schedule = lowered(profile, {2: "recompute", 3: "recompute", 4: "recompute"}, ROOMY)
    assert told(schedule) == [
        "5 replay 1 keeps [2]",
        "5 drop 1",
        "5 replay 2 keeps [3]",
        "5 drop 2",
        "5 replay 3 keeps [4]",
        "5 drop 3",
    ]
    assert (schedule.sources, schedule.recomputed) == ((1,), (2, 3, 4))


def test_unsaved_intermediates_are_dropped_after_their_last_reader():
    profile = toys.chain(3, size_bytes=10, unsaved_between=1)
    assert told(lowered(profile, {2: "recompute"}, ROOMY)) == [
        "9 replay 0 keeps [1]",
        "9 replay 1 keeps [2]",
        "9 drop 1",
    ]


def test_a_swapped_source_is_waited_for_before_its_reader():
    profile = toys.chain(5, size_bytes=10)
    assert told(lowered(profile, {1: "swap", 2: "recompute", 3: "recompute"}, 1)) == [
        "1 copy_out 1",
        "2 free 1",
        "6 copy_in 1",
        "6 wait 1",
        "6 replay 1 keeps [2]",
        "6 drop 1",
        "6 replay 2 keeps [3]",
        "6 drop 2",
    ]


def in_place_step() -> Profile:
    """x -> a (op 0) -> b, written over a (op 1) -> c (op 2, saves b) -> d."""
    step = toys.ToyStep()
    (first,) = step.op([step.external(10)], [10])
    (second,) = step.op([first], [10], overwrites=first)
    (third,) = step.op([second], [10], saves=[second])
    step.op([third], [10], saves=[third])
    return step.build()


def test_an_in_place_op_takes_over_the_storage_of_a_replayed_intermediate():
    profile = in_place_step()
    schedule = lowered(profile, {2: "recompute"}, ROOMY)
    assert told(schedule) == ["5 replay 0 keeps [1]", "5 replay 1 keeps [2] over [1]"]
    timeline = simulate(Dataflow(profile), schedule)
    assert timeline.point_bytes[2 * 5] == 10 + 10  # the input, and never more than one storage


def test_on_a_fresh_copy_an_in_place_op_takes_new_bytes():
    profile = in_place_step()
    dataflow = Dataflow(profile)
    schedule = lower(dataflow, {2: "recompute"}, ROOMY)
    second = replace(schedule.actions[1], in_place=())
    copying = replace(schedule, actions=(schedule.actions[0], second, Action(5, "drop", 1)))
    points = verify(dataflow, copying, {2: "recompute"}, None)
    assert points[2 * 5] == 10 + 10 + 10
    assert simulate(dataflow, copying).point_bytes.tolist() == points == run_schedule(dataflow, copying).points


def two_readers(*, deaths_first: bool) -> Profile:
    """a is saved by op 1 only; b = f(a) and c = g(a) are saved too. Its own unpack comes before or after c's."""
    step = toys.ToyStep()
    (a,) = step.op([step.external(8)], [10], refusal="cannot be replayed")
    (c,) = step.op([a], [10])
    (d,) = step.op([c], [10], saves=[c])
    step.op([a, d], [10], saves=[a] if deaths_first else [])
    if not deaths_first:
        step.save(a, 1)
    return step.build()


def test_a_kept_source_is_held_past_its_death_until_the_last_replay_that_reads_it():
    profile = two_readers(deaths_first=True)  # a dies in slot 4, c is needed in slot 5
    dataflow = Dataflow(profile)
    schedule = lowered(profile, {2: "recompute"}, ROOMY)
    assert told(schedule) == ["5 replay 1 keeps [2]", "5 drop 1"]
    assert schedule.sources == (1,)
    points = simulate(dataflow, schedule).point_bytes
    assert points[2 * 5] == dataflow.in_core_points[2 * 5] + 10  # a, held beside the new c
    assert points[2 * 5 + 1] == dataflow.in_core_points[2 * 5 + 1]


def test_a_source_that_outlives_the_replay_adds_nothing():
    profile = two_readers(deaths_first=False)
    dataflow = Dataflow(profile)
    schedule = lowered(profile, {2: "recompute"}, ROOMY)
    assert simulate(dataflow, schedule).point_bytes[2 * 5] == dataflow.in_core_points[2 * 5]


def test_what_one_op_writes_comes_back_with_one_replay():
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10])
    left, right = step.op([first], [10, 20])
    (joined,) = step.op([left], [10], saves=[left])
    step.op([joined, right], [10], saves=[right])
    profile = step.build()
    decided = {left: "recompute", right: "recompute"}
    schedule = lowered(profile, decided, ROOMY)
    assert told(schedule) == ["4 replay 0 keeps [1]", f"4 replay 1 keeps [{left}, {right}]", "4 drop 1"]


def test_copies_for_later_start_after_the_replays_of_an_entry():
    step = toys.ToyStep()
    source = step.external(1)
    (early,) = step.op([source], [10])
    (small,) = step.op([early], [1], saves=[early])
    (middle,) = step.op([source], [30])
    (wide,) = step.op([middle], [10])
    (last,) = step.op([wide, small], [1], saves=[wide])
    step.op([last], [1], saves=[last])
    schedule = lowered(step.build(), {early: "swap", wide: "recompute"}, 45)
    assert told(schedule) == [
        "1 copy_out 1",
        "3 free 1",
        "7 replay 2 keeps [3]",
        "7 replay 3 keeps [4]",
        "7 drop 3",
        "7 copy_in 1",
        "10 wait 1",
    ]


def test_a_value_that_the_program_holds_until_its_need_is_kept():
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10])
    (second,) = step.op([first], [10], saves=[first])
    step.op([second], [10], saves=[second])
    step.hold(first, until=5)
    for choice in ("swap", "recompute"):
        schedule = lowered(step.build(), {first: choice}, 1)
        assert (schedule.actions, schedule.swapped, schedule.recomputed) == ((), (), ())


def test_a_value_that_is_written_over_later_is_kept():
    profile = in_place_step()
    first = replace(profile.values[1], saved=True, fixed=None)
    profile = replace(profile, values=(profile.values[0], first, *profile.values[2:]))
    for choice in ("swap", "recompute"):
        schedule = lower(Dataflow(profile), {1: choice}, 1)
        assert (schedule.actions, schedule.swapped, schedule.recomputed) == ((), (), ())


def test_a_source_that_autograd_drops_early_is_kept_rather_than_swapped_and_replayed_rather_than_lost():
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10])
    (second,) = step.op([first], [10])
    step.op([first], [1], saves=[first], backward_ops=0)  # op 2: autograd drops value 1 after the forward pass
    (last,) = step.op([second], [10], saves=[second])
    step.op([last], [10], saves=[last])
    profile = step.build()
    assert (profile.values[1].first_unpack, profile.values[1].death) == (-1, 5)
    schedule = lowered(profile, {1: "swap", 2: "recompute"}, 1)
    assert told(schedule) == ["6 replay 1 keeps [2]", "6 drop 1"]
    assert schedule.sources == (1,)
    schedule = lowered(profile, {1: "recompute", 2: "recompute"}, 1)
    assert told(schedule) == ["6 replay 0 keeps [1]", "6 replay 1 keeps [2]", "6 drop 1"]
    schedule = lowered(profile, {1: "swap"}, 1)
    assert told(schedule) == ["1 copy_out 1", "3 free 1"]


def test_host_room_is_aligned_and_apart():
    profile = toys.chain(5, size_bytes=5000)
    schedule = lowered(profile, {1: "swap", 2: "swap", 3: "swap"}, 1)
    assert schedule.host_offsets == ((1, 0), (2, 8192), (3, 16384))
    assert schedule.host_bytes == 3 * 8192


def test_region_model_acts_only_where_its_runtime_looks():
    step = toys.ToyStep()
    current = step.external(10)
    for _ in range(6):
        (current,) = step.op([current], [10], saves=[current])
    profile = step.build(model=(0, 4))  # ops 4 and 5 are the loss; value 4 is the model's output
    dataflow = Dataflow(profile, "model")
    assert [value.id for value in dataflow.activations] == [1, 2, 3]
    assert dataflow.anchor_slots == (8, 9, 10)  # slots 6 and 7 unpack what only the loss saved
    decided = dict.fromkeys((1, 2, 3), "swap")
    schedule = lower(dataflow, decided, 1)
    verify(dataflow, schedule, decided, None)
    assert {action.slot for action in schedule.actions} <= {0, 1, 2, 3, 8, 9, 10}
    assert schedule.swapped == (1, 2)  # 3 could only be freed where it is needed
    assert run_schedule(dataflow, schedule).points == simulate(dataflow, schedule).point_bytes.tolist()


def test_decisions_that_make_no_sense_are_refused_in_one_line():
    step = toys.ToyStep()
    (first,) = step.op([step.external(8)], [10], refusal="it talks to others")
    step.op([first], [10], saves=[first])
    dataflow = Dataflow(step.build())
    with pytest.raises(UsageError, match="value 1 cannot be recomputed: it talks to others"):
        lower(dataflow, {1: "recompute"}, ROOMY)
    with pytest.raises(UsageError, match="value 0, which is not an activation"):
        lower(dataflow, {0: "swap"}, ROOMY)


def attention_shape(readers: int) -> tuple[Profile, int, list[int]]:
    """Keys that nobody saves; `readers` ops read them, and each saves a function of what it made of them."""
    step = toys.ToyStep()
    memory = step.external(8)
    (keys,) = step.op([memory], [8], name="keys")
    saved = []
    for number in range(readers):
        (summed,) = step.op([keys], [8], name=f"sum {number}")
        saved += step.op([summed], [8], saves_outputs=[0], name=f"tanh {number}")
    return step.build(), keys, saved


def test_an_unsaved_value_that_many_replays_read_is_held_for_them():
    profile, keys, saved = attention_shape(4)
    dataflow = Dataflow(profile)
    assert [dataflow.recipe(value).sources for value in saved] == [(keys,)] * 4
    schedule = lowered(profile, dict.fromkeys(saved, "recompute"), ROOMY)
    assert schedule.sources == (keys,)
    replayed = [action.target for action in schedule.actions if action.kind == "replay"]
    assert len(replayed) == 8  # a sum and a tanh each, and never the keys again
    assert profile.values[keys].producer not in replayed
    drops = [action.slot for action in schedule.actions if action.kind == "drop" and action.target == keys]
    assert drops == [schedule.actions[-1].slot]  # held until the last replay that reads it


def test_an_unsaved_value_that_few_replays_read_is_made_again_for_each():
    profile, keys, saved = attention_shape(3)
    dataflow = Dataflow(profile)
    assert [dataflow.recipe(value).sources for value in saved] == [()] * 3
    schedule = lowered(profile, dict.fromkeys(saved, "recompute"), ROOMY)
    assert schedule.sources == ()
    replayed = [action.target for action in schedule.actions if action.kind == "replay"]
    assert replayed.count(profile.values[keys].producer) == 3
