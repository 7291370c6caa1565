"""Counts what happened under a budget, for the summary."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..executor.statistics import RunStats
from .library import Decision, Library
from .summary import AutoSummary


@dataclass
class Tally:
    """Figures over all steps so far.

    Attributes:
        steps: Number of steps by the way they ran.
        left_plan: Number of steps that left their plan.
        over_budget: Number of steps whose measured peak was over the budget.
        peak_bytes: Highest measured peak of a forward and backward pass.
        between_bytes: Highest measured peak between the passes.
        swapped_bytes: Bytes copied to the tier.
        recomputed_ops: Number of ops replayed.
        lost_ms: Time lost against the sum of recorded op times.
    """

    steps: dict[Decision, int] = field(default_factory=lambda: {"in-core": 0, "plan": 0, "online": 0, "record": 0})
    left_plan: int = 0
    over_budget: int = 0
    peak_bytes: int = 0
    between_bytes: int = 0
    swapped_bytes: int = 0
    recomputed_ops: int = 0
    lost_ms: float = 0.0

    @property
    def all_steps(self) -> int:
        """Number of all steps."""
        return sum(self.steps.values())

    def count(self, decision: Decision, left_plan: bool, stats: RunStats, peak_bytes: int, lost_ms: float) -> None:
        """Count a step.

        Args:
            decision: How it ran.
            left_plan: Whether it left its plan.
            stats: Its counters.
            peak_bytes: Its measured peak.
            lost_ms: Time lost, or 0 if it is not known.
        """
        self.steps["online" if left_plan else decision] += 1
        self.left_plan += left_plan
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.swapped_bytes += stats.swapped_out_bytes
        self.recomputed_ops += stats.recomputed_ops
        self.lost_ms += max(0.0, lost_ms)

    def summary(self, budget_bytes: int | None, library: Library) -> AutoSummary:
        """Return the figures as frozen data.

        Args:
            budget_bytes: The budget.
            library: What is known about the steps.
        """
        return AutoSummary(
            budget_bytes=budget_bytes,
            steps=self.all_steps,
            steps_in_core=self.steps["in-core"],
            steps_on_plan=self.steps["plan"],
            steps_online=self.steps["online"] + self.steps["record"],
            steps_recorded=self.steps["record"],
            steps_left_plan=self.left_plan,
            peak_bytes=self.peak_bytes,
            between_peak_bytes=self.between_bytes,
            steps_over_budget=self.over_budget,
            lost_ms=self.lost_ms,
            swapped_bytes=self.swapped_bytes,
            recomputed_ops=self.recomputed_ops,
            shapes=library.shapes(),
            events=tuple(library.events),
        )
