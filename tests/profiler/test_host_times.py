"""The host's time is shared out over ops, and never makes the device wait in-core."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pooch.profiler.times import StepTimes, host_times_ms, never_late, paced_by_launches

TIMES = st.lists(st.floats(0, 100), min_size=1, max_size=30)


def test_the_host_s_time_goes_to_ops_as_launching_them_took_it() -> None:
    plain = StepTimes(10.0, 20.0, 3.0, 1.0)
    host_ms = host_times_ms([2.0, 1.0, 0.5, 0.5, 0.0], 2, plain, [5.0, 5.0, 10.0, 10.0, 0.0])
    assert host_ms == [2.0, 1.0, 0.5, 0.5, 0.0]


def test_a_host_that_waited_for_a_full_queue_does_not_seem_slow_in_the_backward_pass() -> None:
    plain = StepTimes(10.0, 20.0, 1.0, 19.9)  # 0.5 ms for each forward op
    assert host_times_ms([1.0, 1.0, 1.0, 1.0, 0.0], 2, plain, [5.0, 5.0, 10.0, 10.0, 0.0]) == [0.5, 0.5, 0.5, 0.5, 0.0]


def test_a_step_without_measured_launches_is_shared_out_evenly() -> None:
    assert host_times_ms([0.0, 0.0, 0.0], 1, StepTimes(4.0, 4.0, 2.0, 1.0), [4.0, 4.0, 0.0]) == [2.0, 1.0, 0.0]


def test_what_the_host_waits_for_the_device_is_no_work_of_its_own() -> None:
    assert never_late([1.0, 9.0, 1.0, 1.0], [4.0, 4.0, 4.0, 4.0]) == [1.0, 7.0, 1.0, 1.0]


@given(data=st.data(), times_ms=TIMES)
def test_in_core_the_host_is_never_late(data: st.DataObject, times_ms: list[float]) -> None:
    host_ms = data.draw(st.lists(st.floats(0, 100), min_size=len(times_ms), max_size=len(times_ms)))
    held = never_late(host_ms, times_ms)
    assert all(kept <= given for kept, given in zip(held, host_ms, strict=True))
    assert all(h <= d + 1e-6 for h, d in zip(accumulate(held), accumulate(times_ms), strict=True))
    assert never_late(held, times_ms) == pytest.approx(held)


def test_short_kernels_wait_for_their_launches_and_long_ones_hide_them() -> None:
    assert paced_by_launches([1.0, 1.0, 10.0, 1.0, 1.0, 0.0], 4.0) == [5.0, 4.0, 13.0, 1.0, 1.0, 0.0]


@given(kernels_ms=TIMES, launch_ms=st.floats(0, 10))
def test_a_paced_step_takes_no_less_than_its_kernels_or_its_launches(kernels_ms: list[float], launch_ms: float) -> None:
    paced = paced_by_launches([*kernels_ms, 0.0], launch_ms)
    assert len(paced) == len(kernels_ms) + 1
    assert sum(paced) >= max(sum(kernels_ms), launch_ms * len(kernels_ms)) - 1e-6
    assert sum(paced) <= sum(kernels_ms) + launch_ms * len(kernels_ms) + 1e-6
    assert paced_by_launches([*kernels_ms, 0.0], 0.0) == pytest.approx([*kernels_ms, 0.0])
