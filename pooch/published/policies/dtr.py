"""Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021): drop the lowest h_DTR when memory runs short.

Procedure (recalled; the score and the 1% rule checked against a review of the paper and code derived from theirs):
1. no plan: when an allocation does not fit, the tensor with the lowest h = (c + sum of c over e*) / (m * s) is dropped,
   until it fits; c is the time of its op, m its bytes, s the time since its last access;
2. e* is its evicted neighbourhood: evicted ancestors and descendants that are reached through evicted tensors;
3. the prototype replaces e* by classes of a union-find over evicted tensors (h_DTR-eq), and looks at a random sample of
   the square root of their number, leaving out tensors below a hundredth of the mean size;
4. a dropped tensor that is read is made again, dropped parents first; what is made on the way may stay, or be dropped
   again.

Theirs are the score, staleness in time, and that nothing is swapped. Ours is the machine that decides by this score:
only what autograd has saved is dropped, where DTR drops any tensor of the graph; gradients and what the program holds
stay; what the backward pass has read is not dropped again; a little more than is missing leaves at once. Looking for
the lowest score costs no time here. How the run becomes a plan: `planner/policies/online`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from ...analysis.dataflow import Dataflow
from ...ground.errors import UsageError
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.policies.online import online_outcome
from .dtr_rule import Dtr, Neighbourhood, makings_of


@dataclass(frozen=True)
class DynamicRematerialization:
    """The policy with its parameters.

    Attributes:
        neighbourhood: "exact" (e*) or "eq" (classes by union-find).
        samples: 1: look at a random sample, as the prototype does; 0: at all.
    """

    neighbourhood: Neighbourhood = "exact"
    samples: int = 0

    def __post_init__(self) -> None:
        if self.neighbourhood not in get_args(Neighbourhood):
            known = " or ".join(get_args(Neighbourhood))
            raise UsageError(f"option neighbourhood of policy dtr is {self.neighbourhood!r}: give {known}")

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Drop the lowest score.

        Raises:
            InfeasibleBudget: the run exceeds the budget, or the plan of its choices does; the minimum was tried.
        """
        return online_outcome(request, self.rule, "dtr" if self.neighbourhood == "exact" else "dtr_eq")

    def rule(self, dataflow: Dataflow, now_ms: Callable[[], float]) -> Dtr:
        """The rule of one run."""
        return Dtr(makings_of(dataflow), now_ms, self.neighbourhood, bool(self.samples))


dtr = DynamicRematerialization()
dtr_eq = DynamicRematerialization("eq")
