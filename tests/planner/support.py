"""What the planner's tests share: the real evaluator, and an oracle that tries every decision there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from pooch import planner
from pooch.analysis.dataflow import Dataflow
from pooch.ir import Choice, Decisions, OnlineStep, Profile, Schedule, Timeline
from pooch.planner import Evaluation, Evaluator, MakeRule, PlanningRequest, PolicyOutcome, contract
from pooch.planner.search import time_limit
from pooch.schedule import Lowering
from pooch.simulator import run_online, simulate, step_time_ms


class RealEvaluator:
    """Lowers and simulates, and counts how often."""

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self.count = 0
        self._lowering = Lowering(dataflow)

    def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
        self.count += 1
        schedule = self._lowering.lower(decisions, budget_bytes)
        return Evaluation(schedule, simulate(self.dataflow, schedule, detail=False))

    def play(self, schedule: Schedule) -> Timeline:
        return simulate(self.dataflow, schedule, detail=True)

    def time_ms(self, schedule: Schedule) -> float:
        return step_time_ms(self.dataflow, schedule)

    def run_online(self, budget_bytes: int, host_budget_bytes: int | None, make_rule: MakeRule | None) -> OnlineStep:
        return run_online(self.dataflow, budget_bytes, host_budget_bytes, make_rule)


@dataclass(frozen=True)
class Case:
    """A profile, what follows from it, and an evaluator for it."""

    profile: Profile
    dataflow: Dataflow
    evaluator: RealEvaluator

    def share(self, share: float) -> int:
        """A budget, as a share of the in-core peak."""
        return int(self.profile.peak_bytes * share)


def case(profile: Profile) -> Case:
    dataflow = Dataflow(profile)
    return Case(profile, dataflow, RealEvaluator(dataflow))


def all_decisions(dataflow: Dataflow) -> Iterator[dict[int, Choice]]:
    """Every combination of possible choices."""
    ids = [value.id for value in dataflow.activations]
    options: list[tuple[Choice, ...]] = [
        ("keep", "swap", "recompute") if dataflow.refusal(i) is None else ("keep", "swap") for i in ids
    ]
    for chosen in product(*options):
        yield dict(zip(ids, chosen, strict=True))


def oracle_ms(of: Case, budget_bytes: int, host_budget_bytes: int | None = None) -> float | None:
    """The shortest step of any decisions that fit when they are lowered for the budget; None where nothing fits."""
    best: float | None = None
    for decisions in all_decisions(of.dataflow):
        evaluation = RealEvaluator.evaluate(of.evaluator, decisions, budget_bytes)
        fits_host = host_budget_bytes is None or evaluation.schedule.host_bytes <= host_budget_bytes
        if evaluation.timeline.peak_bytes <= budget_bytes and fits_host:
            best = min(evaluation.timeline.step_ms, best if best is not None else float("inf"))
    return best


def make_plan(
    dataflow: Dataflow,
    budget_bytes: int,
    evaluator: Evaluator,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    explain: bool = True,
    **others: Any,
) -> PolicyOutcome:
    """The policy's answer to a request, of which `others` are further fields."""
    request = PlanningRequest(dataflow, budget_bytes, evaluator, **others)
    return planner.make_plan(request, policy, policy_options, explain=explain)


def oracle_peak(of: Case) -> int:
    """The smallest peak of any decisions, each lowered for as little as they can possibly do with."""
    return min(
        of.evaluator.evaluate(decisions, budget_bytes).timeline.peak_bytes
        for decisions in all_decisions(of.dataflow)
        for budget_bytes in (1, of.profile.peak_bytes // 2)
    )


def leave_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on planning sees a clock that stands long after every time limit, whatever the machine does."""
    for module in (contract, time_limit):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1e12))
