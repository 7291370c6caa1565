"""Profiles and plans that were changed: whatever comes out trains right, or one line says why not."""

from __future__ import annotations

import json
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType

import pytest
import torch

import pooch
from pooch.analysis.dataflow import Dataflow
from pooch.api.manual import plan_from_decisions
from pooch.api.simulation import simulate
from pooch.errors import PoochError
from pooch.executor import apply_plan
from pooch.ir import Plan, Profile, Region
from tests.api.altering import altered_text
from tests.executor.conftest import decide_on_everything, one_thread
from tests.executor.nets import make_job
from tests.executor.support import assert_same, mixed, profile_job, tight_plan, train
from tests.toys import random_decisions

__all__ = ["decide_on_everything", "one_thread"]

MOST_SECONDS = 20  # for one file; a hang, not a slow machine
PLAN_SEEDS = range(240)
UNSEALED_SEEDS = range(1000, 1060)
PROFILE_SEEDS = range(200, 440)
KINDS = ("conv", "transformer")


@dataclass(frozen=True)
class Saved:
    """A small job's files, and what plain training of it gives."""

    kind: str
    profile: str
    plans: dict[Region, str]
    plain: dict[str, torch.Tensor]


@cache
def saved(kind: str, folder: Path) -> Saved:
    profile = profile_job(make_job(kind))
    profile.save(folder / "profile.json")
    plans: dict[Region, str] = {}
    regions: tuple[Region, ...] = ("step", "model")
    for region in regions:
        tight_plan(profile, mixed(profile, region), region).save(folder / "plan.json")
        plans[region] = (folder / "plan.json").read_text()
    plain, _ = train(make_job(kind), None, steps=2)
    return Saved(kind, (folder / "profile.json").read_text(), plans, plain)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    (tmp_path / "spill").mkdir()
    return tmp_path / "spill"


@contextmanager
def not_for_ever(what: str) -> Iterator[None]:
    def too_long(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} takes more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def told(error: PoochError) -> None:
    assert "\n" not in str(error)
    assert str(error)


def trained(plan: Plan, expected: Saved, spill: Path) -> str:
    """Train under the plan: "right", or where it was refused."""
    job = make_job(expected.kind)
    try:
        apply_plan(plan, job.model, spill_directory=spill).remove()
    except PoochError as error:
        told(error)
        return "refused on apply"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned, _ = train(job, plan, steps=2, spill_directory=spill)
    except PoochError as error:
        told(error)
        return "refused in the step"
    assert_same(expected.plain, planned)
    return "right"


def outcome_of_plan(path: Path, expected: Saved, spill: Path) -> str:
    try:
        plan = Plan.load(path)
    except PoochError as error:
        told(error)
        return "refused on load"
    return trained(plan, expected, spill)


def outcome_of_profile(path: Path, expected: Saved, random: Random, spill: Path) -> str:
    try:
        profile = Profile.load(path)
    except PoochError as error:
        told(error)
        return "refused on load"
    try:
        plan = some_plan(profile, random)
        simulate(profile, plan)
    except PoochError as error:
        told(error)
        return "refused on planning"
    return trained(plan, expected, spill)


def some_plan(profile: Profile, random: Random) -> Plan:
    region: Region = random.choice(["step", "model"])
    if random.random() < 0.1:
        return pooch.plan(profile, "70%", region=region, time_limit_s=0.5, explain=False)
    return plan_from_decisions(profile, random_decisions(random, Dataflow(profile, region)), region=region)


def over(seeds: range, outcome: Callable[[Random, Saved, Path], str], folder: Path) -> Counter[str]:
    """Outcomes of one altered file for each seed; whatever is no outcome names its seed."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        random = Random(seed)
        expected = saved(random.choice(KINDS), folder)
        with not_for_ever(f"seed {seed} of {expected.kind}"):
            try:
                outcomes[outcome(random, expected, folder / "altered.json")] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed} of {expected.kind}: {type(error).__name__}: {error}") from error
    return outcomes


def nothing_is_left(folder: Path, spill: Path) -> None:
    assert not list(spill.iterdir())
    assert {path.name for path in folder.iterdir()} <= {"profile.json", "plan.json", "altered.json"}


@pytest.mark.slow
def test_altered_plans_train_right_or_are_told_in_one_line(folder: Path, spill: Path) -> None:
    def outcome(random: Random, expected: Saved, path: Path) -> str:
        path.write_text(altered_text(random, random.choice(list(expected.plans.values())), sealed=True))
        return outcome_of_plan(path, expected, spill)

    outcomes = over(PLAN_SEEDS, outcome, folder)
    assert outcomes["refused on load"] > len(PLAN_SEEDS) / 3
    assert outcomes["right"] > len(PLAN_SEEDS) / 20
    nothing_is_left(folder, spill)


@pytest.mark.slow
def test_altered_profiles_plan_and_train_right_or_are_told_in_one_line(folder: Path, spill: Path) -> None:
    def outcome(random: Random, expected: Saved, path: Path) -> str:
        path.write_text(altered_text(random, expected.profile, sealed=False))
        return outcome_of_profile(path, expected, random, spill)

    outcomes = over(PROFILE_SEEDS, outcome, folder)
    assert outcomes["refused on load"] > len(PROFILE_SEEDS) / 3
    assert outcomes["right"] > len(PROFILE_SEEDS) / 20
    nothing_is_left(folder, spill)


def test_a_plan_changed_by_hand_is_told_from_the_one_that_was_saved(folder: Path, spill: Path) -> None:
    def outcome(random: Random, expected: Saved, path: Path) -> str:
        text = random.choice(list(expected.plans.values()))
        altered = altered_text(random, text, sealed=False)
        path.write_text(altered)
        same = is_same_json(text, altered)
        found = outcome_of_plan(path, expected, spill)
        assert found == ("right" if same else "refused on load")
        return found

    outcomes = over(UNSEALED_SEEDS, outcome, folder)
    assert outcomes["refused on load"] > len(UNSEALED_SEEDS) / 2


def test_the_files_as_they_were_train_right_with_every_mechanism_at_work(folder: Path, spill: Path) -> None:
    for kind in KINDS:
        expected = saved(kind, folder)
        for text in expected.plans.values():
            (folder / "altered.json").write_text(text)
            plan = Plan.load(folder / "altered.json")
            assert {action.kind for action in plan.schedule.actions} >= {
                "copy_out",
                "free",
                "copy_in",
                "replay",
                "drop",
            }
            assert trained(plan, expected, spill) == "right"


def is_same_json(one: str, other: str) -> bool:
    try:
        return one == other or bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False
