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

MOST_TRIED = 100  # alternatives that are simulated, of the largest activations
MOST_WORK = 40_000  # activations times alternatives: each simulation takes longer where there are many


@dataclass(frozen=True, slots=True)
class Alternative:
    """One activation with another choice, everything else as planned.

    Attributes:
        choice: the other one. change_ms: of the step; inf where it does not fit.
        over_bytes: by how much it is over the device budget or, where it keeps that, over the host budget (0: it fits).
    """

    choice: Choice
    change_ms: float
    over_bytes: int

    @property
    def text(self) -> str:
        """For people, such as "swap it: +1.20 ms"."""
        if self.over_bytes > 0:
            return f"{self.choice} it: over the budget by {format_bytes(self.over_bytes)}"
        sign = "-" if self.change_ms < 0 else "+"
        return f"{self.choice} it: {sign}{format_ms(abs(self.change_ms))}"


def weigh_alternatives(
    request: PlanningRequest, candidates: Candidates, decisions: Decisions, planned: Evaluation
) -> dict[int, tuple[Alternative, ...]]:
    """The alternatives of the largest activations, as many as can be simulated quickly; none where all are kept."""
    if all(choice == "keep" for choice in decisions.values()):
        return {}
    most = min(MOST_TRIED, MOST_WORK // max(1, len(candidates.items)))
    found: dict[int, tuple[Alternative, ...]] = {}
    with suppress(KeyboardInterrupt):  # the plan is there already
        for item in sorted(candidates.items, key=lambda item: (-item.memory_bytes, item.value)):
            if most <= 0 or request.remaining_s() <= 0:
                break
            found[item.value] = tuple(_alternatives(request, item, decisions, planned))
            most -= len(found[item.value])
    return found


def _alternatives(
    request: PlanningRequest, item: Candidate, decisions: Decisions, planned: Evaluation
) -> Iterator[Alternative]:
    for choice in item.choices:
        if choice == decisions[item.value]:
            continue
        instead = request.evaluator.evaluate({**decisions, item.value: choice}, request.budget_bytes)
        over_bytes = instead.timeline.peak_bytes - request.budget_bytes
        if over_bytes <= 0 and request.host_budget_bytes is not None:
            over_bytes = instead.schedule.host_bytes - request.host_budget_bytes
        change_ms = instead.timeline.step_ms - planned.timeline.step_ms if over_bytes <= 0 else math.inf
        yield Alternative(choice, change_ms, max(0, over_bytes))
