"""Plans tried with the evaluator, and the best of them so far, which is the answer if everything later fails."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...ir.plan import Choice, Decisions
from ..candidates import Candidates
from ..contract import Evaluation, Evaluator, PlanningRequest

MANY = 400  # from so many activations on, an evaluation takes long enough to be sparing with them
ELITE = 6  # good plans that are remembered as places to start from
MOST_REMEMBERED_BYTES = 64 * 2**20
BYTES_PER_OP = 100  # about what one evaluation keeps: two points and a start per op, and its share of the actions
BISECTIONS = 8  # halvings between the budget that decisions surely need and one that is known to do


@dataclass(frozen=True, slots=True)
class Trial:
    """Decisions as they were lowered and simulated.

    Attributes:
        decisions: one choice per activation, as carried out: what never has to leave is kept.
        evaluation: of these decisions.
        fits: whether it is within the device and the host budget.
    """

    decisions: dict[int, Choice]
    evaluation: Evaluation
    fits: bool

    @property
    def step_ms(self) -> float:
        """Simulated duration."""
        return self.evaluation.timeline.step_ms

    @property
    def rank(self) -> tuple[float, int]:
        """Shorter is better, then leaner; times are rounded so that noise of sums decides nothing."""
        return round(self.step_ms, 6), self.evaluation.timeline.peak_bytes


class Trials:
    """Evaluates plans and keeps the best that fits.

    Args:
        request: what to plan.
        candidates: the activations and what is allowed for them; None: everything that is possible.
    """

    def __init__(self, request: PlanningRequest, candidates: Candidates | None = None) -> None:
        self.request = request
        self.candidates = candidates or Candidates(request.dataflow, None, request.host_budget_bytes)
        self.many = len(self.candidates.items) > MANY
        self.elite: list[Trial] = []  # that fit, the best first
        self.count = 0
        self._seen: set[tuple[Choice, ...]] = set()

    def run(self, decisions: Decisions, lowering_bytes: int | None = None) -> Trial:
        """Evaluate decisions and remember them if they are the best so far; activations that are not named are kept.

        `lowering_bytes` is a smaller budget to lower for instead of the request's.
        """
        chosen = self.complete(decisions)
        evaluation = self.request.evaluator.evaluate(chosen, lowering_bytes or self.request.budget_bytes)
        self.count += 1
        self._seen.add(tuple(chosen.values()))
        return self.offer(chosen, evaluation)

    def offer(self, decisions: Decisions, evaluation: Evaluation) -> Trial:
        """Remember a plan that was made elsewhere, if it fits and is among the best so far."""
        fits = evaluation.timeline.peak_bytes <= self.request.budget_bytes and self.fits_host(evaluation)
        trial = Trial(_carried_out(decisions, evaluation), evaluation, fits)
        if fits and all(other.rank != trial.rank for other in self.elite):
            self.elite = sorted([*self.elite, trial], key=lambda other: other.rank)[:ELITE]
        return trial

    @property
    def best(self) -> Trial | None:
        """The fastest plan so far that fits, the leanest among equals."""
        return self.elite[0] if self.elite else None

    @property
    def best_ms(self) -> float:
        """Simulated duration of the best plan; inf without one."""
        return self.best.step_ms if self.best is not None else math.inf

    def complete(self, decisions: Decisions) -> dict[int, Choice]:
        """Decisions with a choice for every activation: those that are not named are kept."""
        return {item.value: decisions.get(item.value, "keep") for item in self.candidates.items}

    def fits_host(self, evaluation: Evaluation) -> bool:
        """Whether the schedule's tier is within the host budget."""
        allowed = self.request.host_budget_bytes
        return allowed is None or evaluation.schedule.host_bytes <= allowed

    def is_promising(self, decisions: Mapping[int, Choice]) -> bool:
        """Whether decisions are new, and might fit and be faster than the best; no lowering is needed to tell."""
        if tuple(decisions.values()) in self._seen:
            return False
        if self.best is not None and self.candidates.least_ms(decisions) > self.best.rank[0]:
            return False
        return self.might_fit(decisions)

    def might_fit(self, decisions: Decisions) -> bool:
        """Whether what decisions need at the very least is within the budget."""
        return int(self.candidates.least_points(decisions).max()) <= self.request.budget_bytes

    def fitting(self, decisions: Decisions) -> Trial | None:
        """The trial of decisions, or None if they do not fit; often a sum of bytes is enough to tell."""
        trial = self.run(decisions) if self.might_fit(decisions) else None
        return trial if trial is not None and trial.fits else None

    def least_budget(self, decisions: Decisions) -> int:
        """The smallest budget found under which these decisions fit, by bisection over what they are lowered for.

        It is reached: lowering for exactly this many bytes was seen to stay within them.
        """
        chosen = self.complete(decisions)
        low = int(self.candidates.least_points(chosen).max())
        reached = self._peak_when_lowered_for(chosen, low)
        if reached <= low:
            return low
        high = self._settle(chosen, reached)
        for _ in range(BISECTIONS):
            middle = (low + high) // 2
            if middle in (low, high):
                break
            if self._peak_when_lowered_for(chosen, middle) <= middle:
                high = middle
            else:
                low = middle
        return high

    def _settle(self, decisions: Decisions, start_bytes: int) -> int:
        """A budget at or above `start_bytes` that decisions keep when they are lowered for it."""
        budget_bytes = start_bytes
        while (peak_bytes := self._peak_when_lowered_for(decisions, budget_bytes)) > budget_bytes:
            budget_bytes = peak_bytes
        return budget_bytes

    def _peak_when_lowered_for(self, decisions: Decisions, budget_bytes: int) -> int:
        self.count += 1
        return self.request.evaluator.evaluate(decisions, budget_bytes).timeline.peak_bytes


def _carried_out(decisions: Decisions, evaluation: Evaluation) -> dict[int, Choice]:
    """The decisions without those that the lowering did not need."""
    schedule = evaluation.schedule
    leaving: dict[Choice, frozenset[int]] = {
        "keep": frozenset(decisions),
        "swap": frozenset(schedule.swapped),
        "recompute": frozenset(schedule.recomputed),
    }
    return {value: choice if value in leaving[choice] else "keep" for value, choice in decisions.items()}


class Remembering:
    """Evaluates the same decisions under the same budget once: parts of a search share many of their plans.

    The more ops the step has, the fewer evaluations are remembered.
    """

    def __init__(self, evaluator: Evaluator, ops: int) -> None:
        self._evaluator = evaluator
        self.play, self.time_ms, self.run_online = evaluator.play, evaluator.time_ms, evaluator.run_online
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
