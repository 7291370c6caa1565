"""vDNN (Rhu et al. 2016): offload the inputs of layers and prefetch one layer ahead.

Procedure of the dynamic version (recalled; the abstract was read):
1. if everything fits, offload nothing;
2. otherwise offload the inputs of convolutions (vDNN_conv); if that does not fit, the inputs of all layers (vDNN_all);
3. copy an input out while the last layer that reads it runs; the end of that layer waits for the copy;
4. in the backward pass, prefetch an input while the layer before the one that needs it runs.

The timing is the paper's: freed at the first slot after the last reader, copied in exactly one anchor ahead.
Convolution algorithms are not chosen. See `operators` for networks without convolutions.
"""

from __future__ import annotations

from ...analysis.dataflow import Dataflow
from ...errors import InfeasibleBudget
from ...ir.plan import Choice
from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import outcome_of
from ...planner.search.trials import Trial, Trials
from .operators import heavy_ops
from .timing import one_anchor_ahead, played, swap_schedule, trips_of


def vdnn(request: PlanningRequest) -> PolicyOutcome:
    """Offload nothing, the inputs of convolutions, or the inputs of all layers: the first that fits.

    Raises:
        InfeasibleBudget: none of them fits.
    """
    trials = Trials(request)
    every_op = frozenset(range(request.dataflow.profile.forward_ops))
    peaks = []
    for readers in (frozenset[int](), heavy_ops(request.dataflow), every_op):
        trial = _offloaded(trials, inputs_of(trials.candidates, readers))
        if trial.fits:
            return outcome_of(trials, trial)
        peaks.append(trial.evaluation.timeline.peak_bytes)
    raise InfeasibleBudget(request.budget_bytes, min(peaks), "vdnn")


def inputs_of(candidates: Candidates, readers: frozenset[int]) -> dict[int, Choice]:
    """Return decisions that swap what these ops read."""
    dataflow: Dataflow = candidates.dataflow
    read = {value for op in readers for value in dataflow.profile.ops[op].reads}
    return {item.value: "swap" for item in candidates.items if item.can_swap and item.value in read}


def _offloaded(trials: Trials, decisions: dict[int, Choice]) -> Trial:
    """Copy out and free as soon as possible, and copy in one anchor ahead (steps 3 and 4)."""
    request = trials.request
    tight = request.evaluator.evaluate(decisions, 0).schedule
    schedule = swap_schedule(request.dataflow, tight, one_anchor_ahead(request.dataflow, trips_of(tight)))
    return trials.offer(trials.complete(decisions), played(request.evaluator, schedule))
