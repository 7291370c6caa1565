"""TFLMS (Le, Imai, Negishi, Kawachiya 2018), version 1: swaps written into the graph, triggered by distance.

Procedure (read: the authors' module for TensorFlow):
1. starting at the input, give `n_tensors` outputs that gradient ops read (-1: all) a swap-out and swap-ins, except
   those that filters of scopes and types leave out;
2. trigger a swap-in by an op at least `lb` and at most `ub` levels before its reader. `chain_rule`, the default, walks
   along the forward pass from the value, and takes the gradient of the op that it finds; `direct_order` walks back from
   the reader in topological order;
3. `fuse_swapins`: use one swap-in for all readers, triggered for the earliest;
4. `swap_branches`: also swap outputs between forward readers that are more than `branch_threshold` levels apart.

The user sets the parameters; here, `n_tensors=0` is what users do: as few as fit. The start of a copy in is the
paper's, or later if memory does not permit that. What is given a swap-out leaves, whether or not there is room.

Ours: the slots at which values are freed. A copy in starts at an anchor, where the gradient of an op begins; anchors
are a sequence, so `direct_order` finds one at `lb`, whatever `ub` is. Without a trigger in reach, a copy starts when
its value is needed. Swap-ins are always fused: a profile records the first read of the backward pass alone, and a
value comes back once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...analysis.dataflow import Dataflow
from ...ground.errors import UsageError
from ...planner.candidates import Candidate
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.trials import Trial, Trials
from .fitting import Leaving, attempted, fewest_that, swaps_of
from .levels import ChainRule, without_branches
from .timing import Trip, anchors_ahead, everything_leaves, played_from

TRIGGERS = ("chain_rule", "direct_order")
FURTHEST = 10_000  # levels; the authors' default


@dataclass(frozen=True)
class Tflms:
    """The policy with its parameters.

    Attributes:
        n_tensors: how many tensors to swap, starting at the input. -1: all; 0: as few as fit.
        lb: least number of levels between the start of a copy in and its reader.
        ub: most levels, for the chain rule.
        trigger: how the start of a copy in is found: "chain_rule" or "direct_order".
        swap_branches: whether values also leave between two reads of the forward pass.
        branch_threshold: levels between the reads above which they do.
        include_scopes: paths of modules, separated by commas: only what they make is swapped. "": everything.
        exclude_scopes: what these modules make stays.
        include_types: parts of names of ops, such as "conv,pool": only what they make is swapped. "": everything.
        exclude_types: what these ops make stays.
    """

    n_tensors: int = 0
    lb: int = 1
    ub: int = FURTHEST
    trigger: str = "chain_rule"
    swap_branches: bool = False
    branch_threshold: int = 0
    include_scopes: str = ""
    exclude_scopes: str = ""
    include_types: str = ""
    exclude_types: str = ""

    def __post_init__(self) -> None:
        """Check the parameters.

        Raises:
            UsageError: one is invalid.
        """
        if self.trigger not in TRIGGERS:
            raise UsageError(f"tflms: there is no trigger {self.trigger!r}: choose {' or '.join(TRIGGERS)}")
        if not 0 <= self.lb <= self.ub:
            raise UsageError(f"tflms: lb={self.lb} and ub={self.ub}: give 0 <= lb <= ub")

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Swap tensors, starting at the input.

        Raises:
            InfeasibleBudget: the swaps are not enough.
        """
        return attempted(request, self.planned, "tflms")

    def planned(self, trials: Trials) -> Trial:
        """Return the plan with these parameters, which may not fit."""
        leaving = swaps_of(item for item in trials.candidates.items if self._is_chosen(trials, item))
        if self.n_tensors < 0:
            return self._swapped(trials, leaving)
        if self.n_tensors > 0:
            return self._swapped(trials, leaving[: self.n_tensors])
        count = fewest_that(lambda count: self._swapped(trials, leaving[:count]).fits, len(leaving))
        return self._swapped(trials, leaving[:count])

    def _is_chosen(self, trials: Trials, item: Candidate) -> bool:
        """Whether the filters let it be swapped."""
        op = trials.request.dataflow.profile.ops[item.born]
        return (
            (not self.include_scopes or _is_within(op.module, self.include_scopes))
            and not _is_within(op.module, self.exclude_scopes)
            and (not self.include_types or _has_part(op.name, self.include_types))
            and not _has_part(op.name, self.exclude_types)
        )

    def _swapped(self, trials: Trials, leaving: Leaving) -> Trial:
        request, decisions = trials.request, dict(leaving)
        dataflow, evaluator = request.dataflow, request.evaluator
        schedule = everything_leaves(evaluator, dataflow, decisions, request.budget_bytes).schedule
        schedule = without_branches(dataflow, schedule, self.branch_threshold if self.swap_branches else None)
        timed = played_from(evaluator, dataflow, schedule, self._trigger(dataflow))
        return trials.offer(trials.complete(decisions), timed)

    def _trigger(self, dataflow: Dataflow) -> Callable[[Trip], int]:
        if self.trigger == "direct_order":
            return anchors_ahead(dataflow, self.lb)
        return ChainRule(dataflow, self.lb, self.ub)


def _is_within(module: str, scopes: str) -> bool:
    return any(module == scope or module.startswith(f"{scope}.") for scope in _listed(scopes))


def _has_part(op: str, types: str) -> bool:
    return any(part in op for part in _listed(types))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


tflms = Tflms()
