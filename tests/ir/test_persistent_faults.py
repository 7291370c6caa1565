"""Files with something of what outlives a step that cannot be are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pooch
from pooch.errors import FileFormatError
from pooch.ir import PersistentTensor, Plan, Profile, check_plan, check_profile
from tests.persistent_toys import layered, with_tensors
from tests.toys import chain

GOOD = with_tensors(chain(4, size_bytes=64), layered(4))


def changed(place: int, **fields: Any) -> Profile:
    tensors = list(GOOD.persistent)
    tensors[place] = replace(tensors[place], **fields)
    return replace(GOOD, persistent=tuple(tensors))


FAULTS = {
    "listed twice": (replace(GOOD, persistent=(*GOOD.persistent, GOOD.persistent[0])), "twice"),
    "negative": (changed(0, size_bytes=-1), "negative"),
    "a slot that does not exist": (changed(0, uses=(0, 99)), "do not exist"),
    "not in order": (changed(0, uses=(7, 0)), "not in order"),
    "a gradient of the forward pass": (changed(1, uses=(0,)), "backward pass"),
    "a gradient that nothing makes": (changed(1, uses=()), "backward pass"),
    "a state without a step": (changed(2, is_stepped=False), "no step"),
    "more than there is": (changed(0, allocated_bytes=GOOD.persistent_bytes + 1), "more than all"),
    "more than an op has": (changed(1, allocated_bytes=GOOD.peak_bytes), "fewer bytes"),
}


def test_what_is_right_passes() -> None:
    assert check_profile(GOOD) is None


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_profile_with_a_fault(fault: str, tmp_path: Path) -> None:
    profile, said = FAULTS[fault]
    found = check_profile(profile)
    assert found is not None
    assert said in found
    profile.save(tmp_path / "profile.json")
    with pytest.raises(FileFormatError, match="inconsistent"):
        Profile.load(tmp_path / "profile.json")


def test_a_kind_that_does_not_exist(tmp_path: Path) -> None:
    odd = PersistentTensor("x", "weights", 8, 8, (), False, False)  # type: ignore[arg-type]
    replace(GOOD, persistent=(odd,)).save(tmp_path / "profile.json")
    with pytest.raises(FileFormatError, match="damaged"):
        Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"size_bytes": -1}, "cannot be"),
        ({"copies_out": 2}, "cannot be"),
        ({"away": ((-1, 2, 2),)}, "leaves at a position"),
        ({"away": ((1, 2, -1),)}, "comes back at a position"),
    ],
)
def test_a_plan_with_a_fault(fields: dict[str, Any], said: str) -> None:
    plan: Plan = pooch.plan(GOOD, GOOD.persistent_bytes * 3 // 4, region="step", moves="all", explain=False)
    assert check_plan(plan) is None
    assert plan.persistent is not None
    moves = (replace(plan.persistent.moves[0], **fields), *plan.persistent.moves[1:])
    found = check_plan(replace(plan, persistent=replace(plan.persistent, moves=moves)))
    assert found is not None
    assert said in found
    twice = replace(plan.persistent, moves=(*plan.persistent.moves, plan.persistent.moves[0]))
    assert "twice" in (check_plan(replace(plan, persistent=twice)) or "")
    negative = replace(plan.persistent, staying_bytes=-1)
    assert "negative" in (check_plan(replace(plan, persistent=negative)) or "")
