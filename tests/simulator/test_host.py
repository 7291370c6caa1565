"""The host of a device with streams: an op starts once the device is free and the host has got to it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.api.hooked import dataflow_of
from pooch.ir import Device, HookCosts, Link, Profile, Schedule
from pooch.schedule import lower
from pooch.simulator import simulate, step_time_ms
from tests import toys

NOTHING = Schedule((), (), (), (), (), 0)
FULL = Link("full duplex", 0.0, 0.0, 5.0, 10.0)  # 2 ms out and 1 ms in for the chain's values of 10 bytes
NO_TIME = Link("takes no time", 0.0, 0.0, 1e30, 1e30)


def on_streams(profile: Profile, host_ms: list[float] | float = 0.0, hooks: HookCosts | None = None) -> Profile:
    """The profile as a device with streams has it; `host_ms` of each op but the closing one."""
    each = [host_ms] * (len(profile.ops) - 1) + [0.0] if isinstance(host_ms, float) else host_ms
    ops = tuple(replace(op, host_ms=ms) for op, ms in zip(profile.ops, each, strict=True))
    return replace(profile, device=Device("cuda", "toy", 2**34), ops=ops, hooks=hooks or HookCosts())


def without_device_time(profile: Profile) -> Profile:
    return replace(profile, link=NO_TIME, ops=tuple(replace(op, time_ms=0.0) for op in profile.ops))


def scheduled(profile: Profile, seed: int) -> tuple[Dataflow, Schedule]:
    """Random decisions of the profile, as its hooks see it."""
    random = Random(seed)
    dataflow = dataflow_of(profile, "step", hooked=True)
    return dataflow, lower(dataflow, toys.random_decisions(random, dataflow), random.randint(1, profile.peak_bytes))


def host_costs(profile: Profile) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0, 10), min_size=len(profile.ops), max_size=len(profile.ops))


def test_an_op_waits_for_the_host_that_is_still_issuing_the_ones_before_it() -> None:
    profile = on_streams(toys.chain(5, size_bytes=10), [3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 9.0, 0.0, 0.0, 0.0])
    timeline = simulate(Dataflow(profile), NOTHING)
    assert timeline.slot_start_ms.tolist() == [0, 3, 4, 5, 6, 7, 9, 11, 13, 15, 17, 17]
    assert timeline.step_ms == 17  # ops of 1 ms forward and 2 ms backward; the 9 ms of the host are hidden behind them
    slow = simulate(Dataflow(on_streams(profile, 4.0)), NOTHING)
    assert slow.slot_start_ms.tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 40]


def test_hooks_cost_nothing_while_the_host_is_ahead_and_all_of_it_where_it_is_not() -> None:
    hooks = HookCosts(op_ms=0.5, replay_ms=0.25, copy_ms=0.125)
    ahead = on_streams(toys.chain(5, size_bytes=10, link=FULL), 0.25, hooks)
    behind = on_streams(toys.chain(5, size_bytes=10, link=FULL), [1.0] * 5 + [2.0] * 5 + [0.0], hooks)
    for profile, expected_ms in ((ahead, 15 + 2), (behind, 15 + 5 * 0.5 + 2 * (1 + 0.5 + 0.25))):
        dataflow = dataflow_of(profile, "step", hooked=True)
        timeline = simulate(dataflow, lower(dataflow, {2: "recompute", 3: "recompute"}, 1))
        assert timeline.step_ms == expected_ms
        assert timeline.replay_ms == 2
    assert simulate(Dataflow(behind), NOTHING).step_ms == 15  # in-core the host is never late


def test_a_copy_starts_once_the_host_has_issued_it() -> None:
    profile = on_streams(toys.chain(5, size_bytes=10, link=FULL), 0.0, HookCosts(copy_ms=4.0))
    dataflow = Dataflow(profile)
    timeline = simulate(dataflow, lower(dataflow, {1: "swap"}, 1))
    copies = [(i.stream, i.start_ms, i.end_ms) for i in timeline.intervals if i.kind == "copy"]
    assert copies[0] == ("copy_out", 4.0, 6.0)  # op 1 would start at 1; both wait for the host
    assert timeline.slot_start_ms[1] == 4.0
    assert copies[1][1] == timeline.slot_start_ms[8] - 1  # by then the host is ahead again


@settings(max_examples=100, deadline=None)
@given(profile=toys.profiles(), seed=st.integers(0, 2**32 - 1))
def test_a_host_that_costs_nothing_changes_nothing(profile: Profile, seed: int) -> None:
    alone, schedule = scheduled(profile, seed)
    expected, beside = simulate(alone, schedule), simulate(Dataflow(on_streams(profile)), schedule)
    assert beside.intervals == expected.intervals
    assert numpy.array_equal(beside.slot_start_ms, expected.slot_start_ms)
    assert (beside.step_ms, beside.stall_ms, beside.replay_ms) == (
        expected.step_ms, expected.stall_ms, expected.replay_ms,
    )  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(data=st.data(), profile=toys.profiles(), seed=st.integers(0, 2**32 - 1))
def test_a_device_that_takes_no_time_leaves_what_the_host_takes(data, profile: Profile, seed: int) -> None:
    host_ms = data.draw(host_costs(profile))
    hooks = HookCosts(op_ms=0.5, replay_ms=0.25, copy_ms=0.125)
    dataflow, schedule = scheduled(on_streams(without_device_time(profile), host_ms, hooks), seed)
    kinds = [action.kind for action in schedule.actions]
    replayed = [action.target for action in schedule.actions if action.kind == "replay"]
    copies = sum(kind in ("copy_out", "copy_in", "refill") for kind in kinds)
    expected_ms = sum(host_ms) + 0.5 * profile.forward_ops + 0.125 * copies
    expected_ms += sum(host_ms[op] + 0.5 + 0.25 for op in replayed)
    assert step_time_ms(dataflow, schedule) == pytest.approx(expected_ms)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), profile=toys.profiles(), seed=st.integers(0, 2**32 - 1))
def test_more_work_for_the_host_never_makes_a_step_shorter(data, profile: Profile, seed: int) -> None:
    host_ms, more_ms = data.draw(host_costs(profile)), data.draw(host_costs(profile))
    hooks = HookCosts(*(data.draw(st.floats(0, 5)) for _ in range(3)))
    less, schedule = scheduled(on_streams(profile, host_ms), seed)
    more = dataflow_of(
        on_streams(profile, [a + b for a, b in zip(host_ms, more_ms, strict=True)], hooks), "step", hooked=True
    )
    step_ms = step_time_ms(more, schedule)
    assert step_ms >= step_time_ms(less, schedule) - 1e-9
    assert step_ms >= sum(host_ms) + sum(more_ms) - 1e-9
    assert step_ms >= sum(op.time_ms for op in profile.ops) - 1e-9


@settings(max_examples=100, deadline=None)
@given(data=st.data(), profile=toys.profiles())
def test_in_core_a_host_that_keeps_up_costs_nothing(data, profile: Profile) -> None:
    """As profiles are made: by the end of each op the host has taken no longer than the device."""
    shares = data.draw(st.lists(st.floats(0, 1), min_size=len(profile.ops), max_size=len(profile.ops)))
    host_ms = [op.time_ms * share for op, share in zip(profile.ops, shares, strict=True)]
    expected_ms = simulate(Dataflow(profile), NOTHING).step_ms
    assert simulate(Dataflow(on_streams(profile, host_ms)), NOTHING).step_ms == pytest.approx(expected_ms)
