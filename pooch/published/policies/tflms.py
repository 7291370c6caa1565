"""TFLMS (Le, Imai, Negishi, Kawachiya 2018), version 1: swaps written into the graph, triggered by distance.

Procedure (read: the authors' module for TensorFlow):
1. starting at the input, give `n_tensors` outputs that gradient ops read (-1: all) a swap-out and swap-ins;
2. trigger a swap-in by an op at least `lb` and at most `ub` levels before its reader, found by walking back from the
   reader (`direct_order`: in topological order; `chain_rule`: along the backward pass of the forward op);
3. `fuse_swapins`: use one swap-in for all readers, triggered for the earliest;
4. `swap_branches`: also swap outputs between forward readers that are more than `branch_threshold` levels apart.

The user sets the parameters; here, `n_tensors=0` is what users do: as few as fit. The start of a copy in is the
paper's: `lb` anchors ahead (a level is an anchor), or later if memory does not permit that. Ours: the slots at which
values are freed. Anchors are a sequence, so there is one way of walking back (`direct_order`), which makes `ub`
redundant. Swap-ins are always fused, as a value comes back once. `swap_branches` is left out: values come back in the
backward pass only.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import leanest_trial, outcome_of
from ...planner.search.trials import Trial, Trials
from .fitting import Leaving, fewest_leaving, swaps_of
from .timing import delayed, played, swap_schedule, trips_of


@dataclass(frozen=True)
class Tflms:
    """The policy with its parameters.

    Attributes:
        n_tensors: how many tensors to swap, starting at the input. -1: all; 0: as few as fit.
        lb: number of levels between the start of a copy in and its reader.
    """

    n_tensors: int = 0
    lb: int = 1

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Swap tensors, starting at the input.

        Raises:
            InfeasibleBudget: the swaps are not enough.
        """
        trials = Trials(request, Candidates(request.dataflow))
        leaving = swaps_of(trials.candidates.items)
        return outcome_of(trials, late_copies(trials, self._chosen(trials, leaving), self.lb))

    def _chosen(self, trials: Trials, leaving: Leaving) -> Trial:
        if self.n_tensors == 0:
            return fewest_leaving(trials, leaving) or leanest_trial(trials, dict(leaving), "tflms")
        decisions = dict(leaving if self.n_tensors < 0 else leaving[: self.n_tensors])
        trial = trials.run(decisions)
        return trial if trial.fits else leanest_trial(trials, decisions, "tflms")


def late_copies(trials: Trials, trial: Trial, anchors_ahead: int) -> Trial:
    """Return the same swaps, copied in at most `anchors_ahead` anchors ahead. They fit, as no copy starts earlier."""
    request, schedule = trials.request, trial.evaluation.schedule
    late = delayed(request.dataflow, trips_of(schedule), anchors_ahead)
    return trials.offer(trial.decisions, played(request.evaluator, swap_schedule(schedule, late, schedule)))


tflms = Tflms()
