"""TensorFlow's swapping in while loops, and Alvaro's change to it (2019): which tensor leaves first.

Procedure (read: the pull request): tensors of more than 2048 bytes that the loop pushes for its backward pass are
swapped while more than a fraction (70%) of the limit on device memory is in use.

- `tf_latest_first`, TensorFlow before the change: swap the tensor being pushed.
- `tf_earliest_first`, after the change: swap the oldest tensor that is not swapped yet. On each pop with less than the
  fraction in use, bring back the most recently swapped tensor.

Both consider bytes in use, not times. Ours: every activation counts as pushed when it is made; the budget is the limit;
bytes in use are the measured in-core bytes minus what has left; the slots of copies (TensorFlow: at the push, and at
the pop or before; ours: out as late and in as early as the budget permits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy

from ...ir.plan import Choice
from ...planner.candidates import NEVER, Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of, with_smallest_budget
from ...planner.search.trials import Trials

LEAST_BYTES = 2048


@dataclass(frozen=True)
class LoopSwapping:
    """The policy with its parameters.

    Attributes:
        order: whether the latest or the earliest tensor leaves first.
        limit_fraction: share of the budget above which tensors leave.
        least_bytes: tensors of this size or smaller stay.
    """

    order: Literal["latest", "earliest"]
    limit_fraction: float = 0.7
    least_bytes: int = LEAST_BYTES

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Decide by walking the pushes.

        Raises:
            InfeasibleBudget: too little leaves.
        """
        return with_smallest_budget(request, self._attempt, f"tf_{self.order}_first")

    def _attempt(self, request: PlanningRequest) -> PolicyOutcome | None:
        trials = Trials(request)
        trial = trials.run(self.decisions(trials.candidates, request.budget_bytes))
        return outcome_of(trials, trial) if trial.fits else None

    def decisions(self, candidates: Candidates, budget_bytes: int) -> dict[int, Choice]:
        """Return what leaves while the forward pass runs."""
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
