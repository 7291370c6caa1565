"""Methods that go by the kind of a layer: vDNN and SuperNeurons.

vDNN (Rhu et al. 2016) offloads the inputs of layers and prefetches one layer ahead. Procedure of the dynamic version
(recalled; the abstract was read):
1. if everything fits, offload nothing;
2. otherwise offload the inputs of convolutions (vDNN_conv); if that does not fit, the inputs of all layers (vDNN_all);
3. copy an input out while the last layer that reads it runs; the end of that layer waits for the copy;
4. in the backward pass, prefetch an input while the layer before the one that needs it runs.

The timing is the paper's: freed at the first slot after the last reader, copied in exactly one anchor ahead.
Convolution algorithms are not chosen.

SuperNeurons (Wang et al. 2018) as in the PoocH paper swaps expensive layers and recomputes cheap ones. Procedure (read:
the baseline of that name in the authors' fork of PoocH; the SuperNeurons paper itself: abstract):
1. with all other maps swapped, keep maps from the tail of the forward pass until the next one does not fit;
2. of the others, leave the outputs of convolutions swapped and recompute the rest (pooling, activation, normalization);
3. start copies in at the convolutions of the backward pass.

Step 1 does not look ahead to step 2: replays can need more memory than the swaps that they replace, and then there is
no plan. Ours: the slots of copies (as early as the budget permits); values that cannot be recomputed are swapped, and
vice versa.

In networks without convolutions, matrix products and recurrent layers take their place in both.
"""

from __future__ import annotations

from ...analysis.dataflow import Dataflow
from ...ground.errors import InfeasibleBudget
from ...ir.plan import Choice
from ...planner.candidates import Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.trials import Trial, Trials
from .fitting import attempted, chosen, fewest_count, swaps_of
from .timing import anchors_ahead, played, started_at, swap_schedule, trips_of

CONVOLUTIONS = ("conv",)  # parts of the names of ops
PRODUCTS = ("mm", "linear", "matmul", "attention", "lstm", "gru")


def heavy_ops(dataflow: Dataflow) -> frozenset[int]:
    """Return the forward ops that are convolutions, or, if there are none, matrix products and recurrent layers."""
    forward = dataflow.profile.ops[: dataflow.profile.forward_ops]
    for words in (CONVOLUTIONS, PRODUCTS):
        found = frozenset(op.index for op in forward if any(word in op.name for word in words))
        if found:
            return found
    return frozenset()


def vdnn(request: PlanningRequest) -> PolicyOutcome:
    """Offload nothing, the inputs of convolutions, or the inputs of all layers: the first that fits.

    Raises:
        InfeasibleBudget: none of them fits.
    """
    return chosen(request, _first_that_fits)


def _first_that_fits(trials: Trials) -> Trial:
    dataflow = trials.request.dataflow
    every_op = frozenset(range(dataflow.profile.forward_ops))
    peaks = []
    for readers in (frozenset[int](), heavy_ops(dataflow), every_op):
        trial = _offloaded(trials, inputs_of(trials.candidates, readers))
        if trial.fits:
            return trial
        peaks.append(trial.evaluation.timeline.peak_bytes)
    raise InfeasibleBudget(trials.request.budget_bytes, min(peaks), "vdnn")


def inputs_of(candidates: Candidates, readers: frozenset[int]) -> dict[int, Choice]:
    """Return decisions that swap what these ops read."""
    dataflow: Dataflow = candidates.dataflow
    read = {value for op in readers for value in dataflow.profile.ops[op].reads}
    return {item.value: "swap" for item in candidates.items if item.can_swap and item.value in read}


def _offloaded(trials: Trials, decisions: dict[int, Choice]) -> Trial:
    """Copy out and free as soon as possible, and copy in one anchor ahead (steps 3 and 4)."""
    request = trials.request
    tight = request.evaluator.evaluate(decisions, 0).schedule
    ahead = started_at(trips_of(tight), anchors_ahead(request.dataflow, 1), even_earlier=True)
    schedule = swap_schedule(request.dataflow, tight, ahead)
    return trials.offer(trials.complete(decisions), played(request.evaluator, schedule))


def superneurons(request: PlanningRequest) -> PolicyOutcome:
    """Keep the tail, swap convolutions, recompute the rest.

    Raises:
        InfeasibleBudget: everything swapped does not fit, or the replays need too much.
    """
    return attempted(request, _without_tail, "superneurons")


def _without_tail(trials: Trials) -> Trial | None:
    head = _head(trials)
    if head is None:
        return None
    expensive = heavy_ops(trials.request.dataflow)
    return trials.run({item.value: _choice(item, expensive) for item in head})


def _head(trials: Trials) -> list[Candidate] | None:
    """Return what leaves if as much of the tail as possible is kept and the rest swapped (step 1)."""
    swaps = swaps_of(trials.candidates.items)
    count = fewest_count(trials, swaps)
    if count is None:
        return None
    last = swaps[count - 1][0] if count else -1
    return [item for item in trials.candidates.items if item.value <= last and (item.can_swap or item.can_recompute)]


def _choice(item: Candidate, expensive: frozenset[int]) -> Choice:
    if item.can_swap and (item.born in expensive or not item.can_recompute):
        return "swap"
    return "recompute"
