"""The page on the policies: no cell in which any of them beats the integer program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.policies import beaten, measure_profile, section
from pooch.ir import Profile
from pooch.planner import policies
from tests.toys import FAST_LINK, blocks, chain, ladder

PROFILES = sorted((Path(__file__).parents[2] / "profiles").glob("*.json"))
TOYS = [blocks(4, link=FAST_LINK), blocks(3), chain(8, size_bytes=1 << 20), ladder(4, size_bytes=1 << 20)]


@pytest.mark.parametrize("profile", TOYS, ids=lambda profile: profile.workload)
def test_nothing_beats_the_integer_program_on_toys(profile: Profile) -> None:
    cells = measure_profile(profile, ["80%", "60%", "45%", "35%"], 60)
    assert not beaten(cells)
    page = section(cells)
    assert all(f"| {policy} |" in page for policy in policies if policy != "in_core")
    assert "**" in page


@pytest.mark.slow
@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_nothing_beats_the_integer_program_on_recorded_profiles(path: Path) -> None:
    assert not beaten(measure_profile(Profile.load(path), ["80%", "60%", "45%", "35%"], 60))


def test_a_beaten_integer_program_is_noticed() -> None:
    cells = measure_profile(blocks(3), ["60%"], 60)
    slow = cells.cell("ilp", cells.columns[0][1])
    assert slow.plan is not None
    worse = replace(slow, plan=replace(slow.plan, predicted_step_ms=2 * slow.plan.predicted_step_ms))
    rows = tuple(worse if row is slow else row for row in cells.rows)
    assert "pooch_2018" in {row.policy for row in beaten(replace(cells, rows=rows))}
