"""How the time limit is shared out among the stages of a search, and what stops one in time.

Stages limit themselves by counts, so that the same inputs give the same plan; shares of time only matter where the
limit is short for the step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ...ir.plan import Decisions
from ...ir.schedule import Schedule
from ...ir.timeline import OnlineStep, Timeline
from ..contract import Evaluation, Evaluator, MakeRule, PlanningRequest


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time limit or, where said so, of the time that is left when the stage begins.

    Attributes:
        rules: once a plan fits and this is used, no further rule is tried.
        programs: the first local search leaves at least this.
        bound: of the time left: the program that gives the bound.
        round: of the time left: each later program.
        another_round: a further program is only begun with more than this left.
        stall_rule: what the classification by stalls takes at most.
        tightening: the bound is only tightened with more than this left.
        parts: restricted programs and smaller budgets are only tried with more than this left.
        solver: of the time left: when a solver that does not heed its own limit is abandoned.
    """

    rules: float = 0.25
    programs: float = 0.7
    bound: float = 0.35
    round: float = 0.2
    another_round: float = 0.1
    stall_rule: float = 0.15
    tightening: float = 0.2
    parts: float = 0.1
    solver: float = 0.9


SHARES = Shares()


class OutOfTime(Exception):
    """The time for one part of planning is over; the search goes on with what it has."""


class Timed:
    """Raises `OutOfTime` from a moment on the monotonic clock on."""

    def __init__(self, evaluator: Evaluator, until_s: float) -> None:
        self._evaluator = evaluator
        self._until_s = until_s

    def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
        """Lower and simulate."""
        self._check()
        return self._evaluator.evaluate(decisions, budget_bytes)

    def play(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule in detail."""
        self._check()
        return self._evaluator.play(schedule)

    def time_ms(self, schedule: Schedule) -> float:
        """The simulated time of a schedule."""
        self._check()
        return self._evaluator.time_ms(schedule)

    def run_online(self, budget_bytes: int, host_budget_bytes: int | None, make_rule: MakeRule | None) -> OnlineStep:
        """Simulate a step that has no plan."""
        self._check()
        return self._evaluator.run_online(budget_bytes, host_budget_bytes, make_rule)

    def _check(self) -> None:
        if time.monotonic() >= self._until_s:
            raise OutOfTime


def part_of(request: PlanningRequest) -> PlanningRequest:
    """The same request with a clock of its own, so that it plans as it would alone, but no later end.

    Its evaluator raises `OutOfTime` at that end.
    """
    timed = Timed(request.evaluator, request.deadline_s)
    started_s = time.monotonic()
    return replace(request, evaluator=timed, progress=None, started_s=started_s, ends_s=request.deadline_s)
