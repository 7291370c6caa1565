"""Times by hand on small steps, and by an independent integral on random ones."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pooch.analysis.dataflow import Dataflow
from pooch.ir import HookCosts, Interval, Link, Timeline
from pooch.schedule import lower
from pooch.simulator import simulate
from tests import toys

HALF = Link("half duplex", 0.0, 0.0, 5.0, 10.0, full_duplex=False)
FULL = replace(HALF, tier="full duplex", full_duplex=True)


def play(link: Link, decided: dict[int, str], budget_bytes: int = 1, layers: int = 5) -> Timeline:
    """A chain of ops of 1 ms forward and 2 ms backward on values of 10 bytes (2 ms out, 1 ms in on HALF and FULL)."""
    dataflow = Dataflow(toys.chain(layers, size_bytes=10, link=link))
    return simulate(dataflow, lower(dataflow, decided, budget_bytes))


def of_kind(timeline: Timeline, *streams_and_kinds: tuple[str, str]) -> list[tuple[str, int, float, float]]:
    chosen = [i for i in timeline.intervals if (i.stream, i.kind) in streams_and_kinds]
    return [(i.stream, i.target, i.start_ms, i.end_ms) for i in chosen]


def test_without_actions_a_step_lasts_as_long_as_its_ops():
    timeline = play(FULL, {})
    assert timeline.step_ms == 5 * 1 + 5 * 2
    assert timeline.stall_ms == timeline.replay_ms == 0
    assert timeline.slot_start_ms.tolist() == [0, 1, 2, 3, 4, 5, 7, 9, 11, 13, 15, 15]


def test_a_free_waits_for_its_copy_and_a_wait_for_its_own():
    timeline = play(FULL, {1: "swap"})
    assert of_kind(timeline, ("copy_out", "copy"), ("copy_in", "copy"), ("compute", "stall")) == [
        ("copy_out", 1, 1.0, 3.0),  # starts as op 1 does
        ("compute", 1, 2.0, 3.0),  # freed before op 2
        ("copy_in", 1, 12.0, 13.0),  # value 1 is needed in slot 8, after 5 + 3 * 2 ms and the stall
        ("compute", 1, 12.0, 13.0),
    ]
    assert (timeline.step_ms, timeline.stall_ms) == (15 + 2, 2)


def test_replays_take_the_time_of_their_op():
    timeline = play(FULL, {2: "recompute", 3: "recompute"})
    assert (timeline.step_ms, timeline.replay_ms, timeline.stall_ms) == (15 + 2, 2, 0)
    assert of_kind(timeline, ("compute", "replay")) == [("compute", 1, 7.0, 8.0), ("compute", 2, 8.0, 9.0)]


def test_replays_and_copies_take_what_hooks_cost_besides():
    profile = toys.chain(5, size_bytes=10, link=FULL)
    costs = HookCosts(op_ms=0.0, replay_ms=0.25, copy_ms=0.5)
    dataflow = Dataflow(replace(profile, hooks=costs))
    timeline = simulate(dataflow, lower(dataflow, {2: "recompute", 3: "recompute"}, 1))
    assert (timeline.step_ms, timeline.replay_ms) == (15 + 2 * 1.25, 2 * 1.25)
    timeline = simulate(dataflow, lower(dataflow, {1: "swap"}, 1))
    assert of_kind(timeline, ("copy_out", "copy"), ("copy_in", "copy"), ("compute", "stall")) == [
        ("copy_out", 1, 1.5, 3.5),  # op 1 would start at 1: the copy is handed over first
        ("compute", 1, 2.5, 3.5),
        ("copy_in", 1, 13.0, 14.0),
        ("compute", 1, 13.0, 14.0),
    ]
    assert timeline.step_ms == 15 + 2 + 2 * 0.5
    assert simulate(dataflow, lower(dataflow, {}, 10**6)).step_ms == 15


@pytest.mark.parametrize(("link", "starts"), [(FULL, [5.0, 5.0]), (HALF, [5.0, 7.0])])
def test_directions_share_one_queue_only_at_half_duplex(link: Link, starts: list[float]):
    timeline = simulate(*crossing(link))
    copies = [i for i in timeline.intervals if i.kind == "copy"][-2:]
    assert [(i.stream, i.start_ms) for i in copies] == list(zip(("copy_out", "copy_in"), starts, strict=True))


def crossing(link: Link):
    """Value 4 starts out in slot 5 (the last copy out) just as value 1 starts back in."""
    dataflow = Dataflow(toys.chain(5, size_bytes=10, link=link))
    schedule = lower(dataflow, {1: "swap"}, 1)
    out, free, back, wait = schedule.actions
    actions = (out, free, replace(out, slot=5, target=4), replace(back, slot=5), wait)
    early = replace(dataflow.profile.ops[0], time_ms=0.0)  # makes up for the stall of 1 ms
    dataflow = Dataflow(replace(dataflow.profile, ops=(early, *dataflow.profile.ops[1:])))
    return dataflow, replace(schedule, actions=actions)


def test_compute_slows_down_while_copies_run():
    slow = replace(FULL, out_compute_share=1.0)
    timeline = play(slow, {1: "swap"}, budget_bytes=50)  # 2 ms of copying during op 1: 1 ms of compute displaced
    assert timeline.step_ms == 15 + 1
    assert timeline.slot_start_ms[:4].tolist() == [0, 1, 3, 4]
    assert timeline.stall_ms == 0


def test_both_directions_at_once_slow_compute_by_both_shares():
    link = replace(FULL, out_compute_share=0.5, in_compute_share=1.5)
    dataflow, schedule = crossing(link)
    timeline = simulate(dataflow, schedule)
    begin = timeline.slot_start_ms[5]
    # 1 ms at rate 1/3 (both), 1 ms at 2/3 (out alone), then the second half of 2 ms of work at full rate
    assert timeline.slot_start_ms[6] - begin == pytest.approx(1 + 1 + (2 - 1 / 3 - 2 / 3))


def test_the_latency_of_a_copy_displaces_no_compute():
    slow = replace(FULL, out_compute_share=1.0, out_latency_ms=2.0)
    timeline = play(slow, {1: "swap"}, budget_bytes=50)  # it waits beside ops 1 and 2, and moves beside the next two
    assert timeline.step_ms == 15 + 1
    assert timeline.slot_start_ms[:5].tolist() == [0, 1, 2, 3, 5]


def test_latency_is_paid_once_a_copy():
    timeline = play(replace(FULL, out_latency_ms=4.0, in_latency_ms=8.0), {1: "swap"})
    assert timeline.stall_ms == (4 + 2 - 1) + (8 + 1)


def test_without_detail_only_the_intervals_are_missing():
    dataflow = Dataflow(toys.chain(6, link=toys.SLOW_LINK))
    schedule = lower(dataflow, toys.some_decisions(dataflow, "sr"), 30)
    full, quick = simulate(dataflow, schedule), simulate(dataflow, schedule, detail=False)
    assert full.intervals
    assert not quick.intervals
    assert quick.step_ms == full.step_ms
    assert quick.stall_ms == full.stall_ms
    assert (quick.point_bytes == full.point_bytes).all()
    assert (quick.slot_start_ms == full.slot_start_ms).all()


@settings(max_examples=150, deadline=None)
@given(profile=toys.profiles(), seed=st.integers(0, 2**32 - 1))
def test_the_clock_adds_up(profile, seed):
    random = Random(seed)
    dataflow = Dataflow(profile)
    decided = toys.random_decisions(random, dataflow)
    schedule = lower(dataflow, decided, random.randint(1, profile.peak_bytes))
    timeline = simulate(dataflow, schedule)
    compute = [i for i in timeline.intervals if i.stream == "compute"]
    check_streams(timeline, profile.link)
    check_rates(timeline, profile, compute)
    replayed = sum(profile.ops[a.target].time_ms for a in schedule.actions if a.kind == "replay")
    work = sum(op.time_ms for op in profile.ops) + replayed
    assert timeline.step_ms >= work + timeline.stall_ms - 1e-9
    assert timeline.step_ms == pytest.approx(sum(i.end_ms - i.start_ms for i in compute))
    if profile.link.out_compute_share == profile.link.in_compute_share == 0:
        assert timeline.step_ms == pytest.approx(work + timeline.stall_ms)
    check_order(timeline, schedule)


def check_streams(timeline: Timeline, link: Link) -> None:
    """Nothing overlaps on one stream; at half duplex no two copies overlap at all."""
    queues: dict[str, list[Interval]] = defaultdict(list)
    for interval in timeline.intervals:
        together = interval.kind == "copy" and not link.full_duplex
        queues["copies" if together else interval.stream].append(interval)
    for queue in queues.values():
        for before, after in itertools.pairwise(queue):
            assert before.end_ms <= after.start_ms + 1e-9


def check_rates(timeline: Timeline, profile, compute: list[Interval]) -> None:
    """Integrating the compute rate over each interval gives the work of its op."""
    link = profile.link
    shares = {"copy_out": link.out_compute_share, "copy_in": link.in_compute_share}
    latencies_ms = {"copy_out": link.out_latency_ms, "copy_in": link.in_latency_ms}
    copies = [i for i in timeline.intervals if i.kind == "copy"]
    moves = [(i.stream, i.start_ms + latencies_ms[i.stream], i.end_ms) for i in copies]
    for interval in compute:
        if interval.kind == "stall":
            continue
        cuts = {interval.start_ms, interval.end_ms}
        cuts |= {t for _, *span in moves for t in span if interval.start_ms < t < interval.end_ms}
        times = sorted(cuts)
        work = 0.0
        for begin, end in itertools.pairwise(times):
            middle = (begin + end) / 2
            share = sum(shares[stream] for stream, start_ms, end_ms in moves if start_ms < middle < end_ms)
            work += (end - begin) / (1 + share)
        assert work == pytest.approx(profile.ops[interval.target].time_ms, abs=1e-9)


def check_order(timeline: Timeline, schedule) -> None:
    """No copy starts before it is issued; no value is freed before it is out or waited for before it is in."""
    starts = timeline.slot_start_ms
    copies = [i for i in timeline.intervals if i.kind == "copy"]
    for interval in timeline.intervals:
        if interval.kind == "copy" and interval.slot:
            assert interval.start_ms >= starts[interval.slot - 1] - 1e-9
    for action in schedule.actions:
        if action.kind in ("free", "empty", "wait"):
            stream = "copy_in" if action.kind == "wait" else "copy_out"
            issued = [c for c in copies if (c.stream, c.target) == (stream, action.target) and c.slot <= action.slot]
            assert bool(issued) == (action.target in schedule.swapped)  # a recomputed value leaves without a copy
            assert all(starts[action.slot] >= copy.end_ms - 1e-9 for copy in issued)
