"""Lowering, simulation and verification composed, as planning needs them."""

from __future__ import annotations

import numpy

from ..analysis.dataflow import Dataflow
from ..ir import Decisions, OnlineStep, Schedule, Timeline
from ..planner import Evaluation, MakeRule
from ..schedule import Lowering, verify
from ..simulator import run_online, simulate, step_time_ms


class StageEvaluator:
    """The evaluator for planners: lowers decisions and simulates the schedule.

    Args:
        dataflow: of the profile and the region.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._lowering = Lowering(dataflow)

    def evaluate(self, decisions: Decisions, budget_bytes: int | numpy.ndarray) -> Evaluation:
        """Lower for a budget, or one at each point, and simulate; the peak of what does not fit is over it."""
        schedule = self._lowering.lower(decisions, budget_bytes)
        return Evaluation(schedule, simulate(self.dataflow, schedule, detail=False))

    def play(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule in detail."""
        return simulate(self.dataflow, schedule, detail=True)

    def time_ms(self, schedule: Schedule) -> float:
        """The simulated time of a schedule."""
        return step_time_ms(self.dataflow, schedule)

    def run_online(self, budget_bytes: int, host_budget_bytes: int | None, make_rule: MakeRule | None) -> OnlineStep:
        """Simulate a step that has no plan, and evicts by a rule."""
        return run_online(self.dataflow, budget_bytes, host_budget_bytes, make_rule)

    def evaluate_smallest(self, decisions: Decisions) -> Evaluation:
        """Lower for the lowest peak that the decisions can reach, as fast as that peak allows.

        The first lowering finds the peak: under a budget of 0, everything leaves as soon and returns as late as it can.
        The second one spreads copies out again below that peak.
        """
        tightest = self.evaluate(decisions, 0)
        relaxed = self.evaluate(decisions, tightest.timeline.peak_bytes)
        return relaxed if relaxed.timeline.peak_bytes <= tightest.timeline.peak_bytes else tightest


def verified_timeline(dataflow: Dataflow, schedule: Schedule, decisions: Decisions, budget_bytes: int) -> Timeline:
    """Verify a schedule, then simulate it in detail.

    Raises:
        InvalidSchedule: it cannot be executed, moves values without a decision, or exceeds the budget.
    """
    verify(dataflow, schedule, decisions, budget_bytes)
    return simulate(dataflow, schedule, detail=True)
