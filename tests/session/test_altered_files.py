"""Profiles and plans that were changed: whatever comes out trains right, or one line says why not."""

from __future__ import annotations

import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from types import FrameType

import pytest
import torch

from pooch.errors import PoochError
from pooch.executor import apply_plan
from pooch.ir import Plan, Profile, Region
from pooch.ir.dataflow import Dataflow
from pooch.session import plan as make_plan
from pooch.session import plan_from_decisions, simulate
from tests.executor.conftest import decide_on_everything, one_thread
from tests.executor.nets import Job, make_job
from tests.executor.support import assert_same, mixed, profile_job, region_of, tight_plan, train
from tests.session.altering import altered_text
from tests.toys import random_decisions

__all__ = ["decide_on_everything", "one_thread"]

MOST_SECONDS = 20  # for one file; a hang, not a slow machine
PLAN_SEEDS = range(240)
UNSEALED_SEEDS = range(1000, 1060)
PROFILE_SEEDS = range(240)
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
        return make_plan(profile, "70%", region=region, time_limit_s=0.5, explain=False)
    return plan_from_decisions(profile, random_decisions(random, Dataflow(profile, region)), region=region)


def run_over(seeds: range, sealed: bool, folder: Path, spill: Path) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        random = Random(seed)
        expected = saved(random.choice(KINDS), folder)
        path = folder / "altered.json"
        path.write_text(altered_text(random, random.choice(list(expected.plans.values())), sealed=sealed))
        with not_for_ever(f"plan {seed}"):
            try:
                outcomes[outcome_of_plan(path, expected, spill)] += 1
            except Exception as error:
                raise AssertionError(f"plan {seed} of {expected.kind}: {type(error).__name__}: {error}") from error
    return outcomes
