"""Evaluators around the injected one: one that remembers, and one that stops a search in time."""

from __future__ import annotations

import time
from dataclasses import replace

from ...ir.plan import Choice, Decisions
from ...ir.schedule import Schedule
from ...ir.timeline import Timeline
from ..contract import Evaluation, Evaluator, PlanningRequest

MOST_REMEMBERED_BYTES = 64 * 2**20
BYTES_PER_OP = 100  # about what one evaluation keeps: two points and a start per op, and its share of the actions


class OutOfTime(Exception):
    """The time for one part of planning is over; the search goes on with what it has."""


class Remembering:
    """Evaluates the same decisions under the same budget once: parts of a search share many of their plans.

    The more ops the step has, the fewer evaluations are remembered.
    """

    def __init__(self, evaluator: Evaluator, ops: int) -> None:
        self._evaluator = evaluator
        self._most = max(1, MOST_REMEMBERED_BYTES // (BYTES_PER_OP * ops))
        self._known: dict[tuple[int, frozenset[tuple[int, Choice]]], Evaluation] = {}

    def evaluate(self, decisions: Decisions, budget_bytes: int) -> Evaluation:
        """Lower and simulate, or remember."""
        leaving = frozenset((value, choice) for value, choice in decisions.items() if choice != "keep")
        key = (budget_bytes, leaving)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self._most:
                self._known.clear()
            known = self._known[key] = self._evaluator.evaluate(decisions, budget_bytes)
        return known

    def play(self, schedule: Schedule) -> Timeline:
        """Simulate a schedule in detail."""
        return self._evaluator.play(schedule)

    def time_ms(self, schedule: Schedule) -> float:
        """The simulated time of a schedule."""
        return self._evaluator.time_ms(schedule)


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
