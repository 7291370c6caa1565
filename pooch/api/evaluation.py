"""Lowering, simulation and verification composed: what planning needs of the stages after it."""

from __future__ import annotations

from pooch.analysis.dataflow import Dataflow
from pooch.ir import Decisions, Schedule, Timeline
from pooch.planner import Evaluation
from pooch.schedule import Lowering, verify
from pooch.simulator import simulate, step_time_ms


class StageEvaluator:
    """The evaluator that planners get: lowers decisions and simulates what comes out.

    Args:
        dataflow: of the profile and region that are planned.
    """

    def __init__(self, dataflow: Dataflow) -> None:
        self.dataflow = dataflow
        self._lowering = Lowering(dataflow)

    def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
        """Lower for the budget and simulate; decisions that do not fit come back with a peak over the budget."""
        schedule = self._lowering.lower(decisions, budget_bytes)
        return Evaluation(schedule, simulate(self.dataflow, schedule, detail=False))

    def play(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule in detail."""
        return simulate(self.dataflow, schedule, detail=True)

    def time_ms(self, schedule: Schedule) -> float:
        """The simulated time of a schedule, and nothing else."""
        return step_time_ms(self.dataflow, schedule)

    def evaluate_smallest(self, decisions: Decisions) -> Evaluation:
        """The decisions at the lowest peak that they can reach, and as fast as that peak allows.

        The first lowering finds the peak: under a budget of nothing, everything leaves as soon and returns as late as
        it can. The second one lets copies spread out again below that peak.
        """
        tightest = self.evaluate(decisions, 0)
        relaxed = self.evaluate(decisions, tightest.timeline.peak_bytes)
        return relaxed if relaxed.timeline.peak_bytes <= tightest.timeline.peak_bytes else tightest


def verified_timeline(dataflow: Dataflow, schedule: Schedule, decisions: Decisions, budget_bytes: int) -> Timeline:
    """The detailed prediction of a schedule, after the verifier's word that it cannot fault.

    Raises:
        InvalidSchedule: it would fault, moves what was not decided on, or takes more than the budget.
    """
    verify(dataflow, schedule, decisions, budget_bytes)
    return simulate(dataflow, schedule, detail=True)
