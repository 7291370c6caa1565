"""The page on the policies: no cell in which any of them beats the integer program."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.policies import beaten, measure_profile, page, section, stored, with_policies
from pooch.ir import Profile
from pooch.planner import policy_names
from tests.toys import FAST_LINK, blocks, chain, ladder

PROFILES = sorted((Path(__file__).parents[2] / "profiles").glob("*.json"))
TOYS = [blocks(4, link=FAST_LINK), blocks(3), chain(8, size_bytes=1 << 20), ladder(4, size_bytes=1 << 20)]


@pytest.mark.parametrize("profile", TOYS, ids=lambda profile: profile.workload)
def test_nothing_beats_the_integer_program_on_toys(profile: Profile) -> None:
    cells = measure_profile(profile, ["80%", "60%", "45%", "35%"], 60)
    assert not beaten(cells)
    made = section(cells)
    assert all(f"| {policy} |" in made for policy in policy_names())
    assert "**" in made


@pytest.mark.slow
@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_nothing_beats_the_integer_program_on_recorded_profiles(path: Path) -> None:
    assert not beaten(measure_profile(Profile.load(path), ["60%", "35%"], 60))


def test_a_beaten_integer_program_is_noticed() -> None:
    cells = measure_profile(blocks(3), ["60%"], 60)
    slow = cells.cell("ilp", cells.columns[0][1])
    assert slow.step_ms is not None
    worse = replace(slow, step_ms=2 * slow.step_ms)
    changed = tuple(worse if cell is slow else cell for cell in cells.cells)
    assert "pooch_2018" in {cell.policy for cell in beaten(replace(cells, cells=changed))}


def test_one_policy_alone_is_planned_again_and_the_other_cells_stay() -> None:
    cells = measure_profile(TOYS[2], ["80%", "60%"], 60, policies=("keep_all", "online", "swap_all"))
    stale = tuple(replace(cell, step_ms=1.0) if cell.policy in ("online", "swap_all") else cell for cell in cells.cells)
    again = with_policies(replace(cells, cells=stale), TOYS[2], ["online"], 60)
    expected = [stale[place] if cell.policy == "swap_all" else cell for place, cell in enumerate(cells.cells)]
    assert list(again.cells) == expected


def test_the_page_is_made_of_the_stored_cells_alone(tmp_path: Path) -> None:
    measured = [measure_profile(toy, ["60%", "45%"], 60, "a digest") for toy in TOYS[:2]]
    path = tmp_path / "policies.json"
    path.write_text(json.dumps({"results": [asdict(cells) for cells in measured]}))
    assert stored(path) == measured
    made = page(stored(path))
    assert made == page(measured)
    assert "**1.0" in made
    assert "needs 100.0%" in made
