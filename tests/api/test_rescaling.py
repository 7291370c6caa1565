"""Profiles carried over to other hardware: what grows, what stays, and that it is marked as modelled."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pooch
from pooch.ir import Profile
from pooch.ir.consistency import check_profile
from tests.rescaling import rescale
from tests.toys import DISK_LINK, FAST_LINK, blocks, chain


@pytest.mark.parametrize("profile", [blocks(3), chain(6, persistent_bytes=50)])
def test_bytes_grow_with_the_batch_and_what_is_persistent_stays(profile: Profile) -> None:
    larger = rescale(profile, 4, 2, DISK_LINK, 2**30, "another device")
    assert larger.peak_bytes - profile.persistent_bytes == 4 * (profile.peak_bytes - profile.persistent_bytes)
    assert larger.persistent_bytes == profile.persistent_bytes
    assert sum(v.size_bytes for v in larger.activations) == 4 * sum(v.size_bytes for v in profile.activations)
    assert check_profile(larger) is None


def test_times_follow_batch_and_speed() -> None:
    profile = blocks(3)
    larger = rescale(profile, 4, 2, FAST_LINK, 2**30, "another device")
    assert larger.step_ms == pytest.approx(2 * profile.step_ms)
    assert sum(op.time_ms for op in larger.ops) == pytest.approx(2 * sum(op.time_ms for op in profile.ops))


def test_it_is_told_that_it_is_a_model() -> None:
    larger = rescale(blocks(2), 4, 2, DISK_LINK, 2**30, "another device")
    assert larger.device.modelled
    assert (larger.device.name, larger.device.memory_bytes, larger.link) == ("another device", 2**30, DISK_LINK)
    assert larger.notes[-1].startswith("modelled: batch x 4, every op 2 times as fast")


def test_gradients_of_parameters_stay_as_they_are() -> None:
    # GIVEN bytes that appear during the backward pass and stay to the end
    profile = chain(6, size_bytes=100)
    last = len(profile.ops) - 4
    grown = [(op, 7 * (op.index > last), 7 * (op.index >= last)) for op in profile.ops]
    ops = tuple(replace(op, entry_bytes=op.entry_bytes + a, peak_bytes=op.peak_bytes + b) for op, a, b in grown)
    larger = rescale(replace(profile, ops=ops), 10, 1, FAST_LINK, 2**30, "another device")
    assert larger.ops[-1].entry_bytes - larger.persistent_bytes == 7


def test_a_rescaled_profile_is_planned_like_any_other() -> None:
    larger = rescale(blocks(4), 2.5, 30, FAST_LINK, 2**30, "another device")
    plan = pooch.plan(larger, "60%", time_limit_s=5)
    assert pooch.simulate(larger, plan).peak_bytes <= plan.budget_bytes
