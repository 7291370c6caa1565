"""What would have happened instead: the plan with one choice changed, lowered and simulated like any other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from pooch.ir.plan import Choice, Decisions
from pooch.planner.candidates import Candidate, Candidates
from pooch.planner.contract import Evaluation, PlanningRequest
from pooch.units import format_bytes, format_ms

MOST_WORK = 300_000  # ops that are played for alternatives, of the largest activations first: about 3 s


@dataclass(frozen=True, slots=True)
class Alternative:
    """One activation with another choice, everything else as planned.

    Attributes:
        choice: the other one. change_ms: of the step; inf where it does not fit.
        over_bytes: by how much it is over the device budget at least or, where it keeps that, over the host budget
            (0: it fits).
    """

    choice: Choice
    change_ms: float
    over_bytes: int

    @property
    def text(self) -> str:
        """For people, such as "swap: +1.2 ms"."""
        if self.over_bytes > 0:
            return f"{self.choice}: {format_bytes(self.over_bytes)} too much"
        sign = "-" if self.change_ms < 0 else "+"
        return f"{self.choice}: {sign}{format_ms(abs(self.change_ms))}"


def weigh_alternatives(
    request: PlanningRequest, candidates: Candidates, decisions: Decisions, planned: Evaluation
) -> dict[int, tuple[Alternative, ...]]:
    """The alternatives of the largest activations, as many as can be simulated quickly; none where all are kept."""
    if all(choice == "keep" for choice in decisions.values()):
        return {}
    weighing = _Weighing(request, candidates, decisions, planned)
    found: dict[int, tuple[Alternative, ...]] = {}
    with suppress(KeyboardInterrupt):  # the plan is there already
        for item in sorted(candidates.items, key=lambda item: (-item.memory_bytes, item.value)):
            if weighing.left <= 0 or request.remaining_s() <= 0:
                break
            found[item.value] = tuple(weighing.of(item))
    return found


class _Weighing:
    """One plan, with one choice after the other changed."""

    def __init__(
        self, request: PlanningRequest, candidates: Candidates, decisions: Decisions, planned: Evaluation
    ) -> None:
        self.request, self.candidates = request, candidates
        self.decisions, self.planned = decisions, planned
        self.left = MOST_WORK

    def of(self, item: Candidate) -> Iterator[Alternative]:
        """The other choices of one activation."""
        for choice in item.choices:
            if choice != self.decisions[item.value]:
                yield self._instead({**self.decisions, item.value: choice}, choice)

    def _instead(self, decisions: Decisions, choice: Choice) -> Alternative:
        request = self.request
        over_bytes = int(self.candidates.least_points(decisions).max()) - request.budget_bytes
        if over_bytes > 0:  # no need to simulate it
            return Alternative(choice, math.inf, over_bytes)
        self.left -= request.dataflow.end
        instead = request.evaluator.evaluate(decisions, request.budget_bytes)
        over_bytes = instead.timeline.peak_bytes - request.budget_bytes
        if over_bytes <= 0 and request.host_budget_bytes is not None:
            over_bytes = instead.schedule.host_bytes - request.host_budget_bytes
        change_ms = instead.timeline.step_ms - self.planned.timeline.step_ms if over_bytes <= 0 else math.inf
        return Alternative(choice, change_ms, max(0, over_bytes))
