"""TFLMS (Le, Imai, Negishi, Kawachiya 2018), version 1: swaps written into the graph, triggered by distance.

Procedure (read: the authors' module for TensorFlow):
1. from the input on, each output that gradient ops read gets a swap-out and swap-ins; `n_tensors` of them
   (-1: all);
2. a swap-in is triggered by an op that comes at least `lb` and at most `ub` levels before its reader, found by walking
   back from the reader (`direct_order`: in topological order; `chain_rule`: along the backward pass of the forward op);
3. `fuse_swapins`: one swap-in for all readers, triggered by the earliest;
4. `swap_branches`: outputs whose forward readers are more than `branch_threshold` levels apart are swapped between
   them too.

The parameters are the user's; `n_tensors=0` here stands for what users do: as few as fit. Theirs is also when a copy in
starts (a level is an anchor): `lb` anchors ahead; where memory does not permit that, later. Ours: the slots at which
values are freed. There is one way of walking back, as anchors are one row (`direct_order`), so that `ub` says nothing
more; swap-ins are always fused (a value comes back once); and `swap_branches` is not there: a schedule brings values
back in the backward pass only.
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
        n_tensors: how many are swapped, from the input on; -1: all, 0: as few as fit.
        lb: levels between the start of a copy in and its reader.
    """

    n_tensors: int = 0
    lb: int = 1

    def __call__(self, request: PlanningRequest) -> PolicyOutcome:
        """Swap from the input on.

        Raises:
            InfeasibleBudget: that many swaps are not enough.
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
    """The same swaps, each copied in at most so many anchors ahead (it fits, as copies start no earlier)."""
    request, schedule = trials.request, trial.evaluation.schedule
    late = delayed(request.dataflow, trips_of(schedule), anchors_ahead)
    return trials.offer(trial.decisions, played(request.evaluator, swap_schedule(schedule, late, schedule)))


tflms = Tflms()
