"""TensorFlow's swapping in while loops, and Alvaro's change to it (2019): which tensor leaves first.

Procedure (read: the pull request): a tensor that the loop pushes for its backward pass, of more than 2048 bytes, is
considered while the device memory in use is over a fraction (70%) of the limit.

- `tf_latest_first`, TensorFlow as it was: the tensor that is being pushed is swapped.
- `tf_earliest_first`, the change: the oldest tensor that is not swapped yet leaves instead. On each pop, with less than
  the fraction in use, the most recently swapped tensor comes back.

Both look at bytes in use and not at times. Ours: every activation counts as pushed when it is made, the budget is the
limit, bytes in use are the measured in-core bytes less what has left; the slots of copies (TensorFlow: at the push, and
at the pop or before; ours free as late and copy in as early as the budget permits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy

from ...ir.plan import Choice
from ...planner.candidates import NEVER, Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import outcome_of
from ...planner.search.trials import Trials
from .fitting import with_smallest_budget

LEAST_BYTES = 2048


@dataclass(frozen=True)
class LoopSwapping:
    """The policy of one order. `limit_fraction`: of the budget, from which on tensors leave."""

    order: Literal["latest", "earliest"]
    limit_fraction: float = 0.7
    least_bytes: int = LEAST_BYTES

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Decide by walking the pushes.

        Raises:
            InfeasibleBudget: what leaves is not enough.
        """
        return with_smallest_budget(request, self._attempt, f"tf_{self.order}_first")

    def _attempt(self, request: PlanningRequest) -> PolicyOutcome | None:
        trials = Trials(request, Candidates(request.dataflow))
        trial = trials.run(self.decisions(trials.candidates, request.budget_bytes))
        return outcome_of(trials, trial) if trial.fits else None

    def decisions(self, candidates: Candidates, budget_bytes: int) -> dict[int, Choice]:
        """What leaves while the forward pass runs."""
        live = candidates.dataflow.in_core_points.copy()
        chosen: dict[int, Choice] = {}
        waiting: list[Candidate] = []
        for item in candidates.items:
            if item.can_swap and item.size_bytes > self.least_bytes:
                waiting.append(item)
                if live[2 * item.born + 1] > self.limit_fraction * budget_bytes:
                    leaving = waiting.pop(0 if self.order == "earliest" else -1)
                    chosen[leaving.value] = "swap"
                    _take_away(live, leaving, item.born)
        return chosen


def _take_away(live: numpy.ndarray, item: Candidate, slot: int) -> None:
    away = 2 * (max(item.release, slot) + 1)
    back = 2 * (item.death if item.need == NEVER else item.need)
    live[away:back] -= item.memory_bytes


tf_latest_first = LoopSwapping("latest")
tf_earliest_first = LoopSwapping("earliest")
