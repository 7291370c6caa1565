"""Capuchin (Peng et al. 2020): swap while copies are hidden behind compute, then choose whatever is cheaper.

Procedure (recalled; the abstract was read):
1. measure one step to find out when each tensor is accessed;
2. free time of a tensor = (its access in the backward pass - copy in) - (its last forward access + copy out);
3. swap tensors in order of decreasing free time, as long as it is not negative and the link has time left, until enough
   bytes are saved;
4. then swap or recompute further tensors, whichever costs less time, beginning with those that save most bytes per ms.

Ours: access times are those of the in-core step; the link has time left if copies out take no longer than the forward
pass and copies in no longer than the backward pass; enough bytes are saved when the plan fits in the simulator; the
slots of copies. Capuchin updates recompute costs when sources leave; here, recipes assume that their sources stay.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy

from ...ground.errors import InfeasibleBudget
from ...ir.plan import Choice
from ...planner.candidates import NEVER, Candidate, Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.outcomes import leanest_trial
from ...planner.search.trials import Trial, Trials
from .fitting import Leaving, attempted, first_fitting, swaps_of


def capuchin(request: PlanningRequest) -> PolicyOutcome:
    """Hidden swaps first, then the cheaper of swap and recompute.

    Raises:
        InfeasibleBudget: the step does not fit, however many values leave.
    """
    return attempted(request, _attempt, "capuchin")


def _attempt(trials: Trials) -> Trial | None:
    leaving = leaving_order(trials.candidates)
    trial = first_fitting(trials, leaving)
    if trial is None:  # it may fit with fewer bytes in flight
        with suppress(InfeasibleBudget):
            trial = leanest_trial(trials, dict(leaving), "capuchin")
    return trial


def leaving_order(candidates: Candidates) -> Leaving:
    """Return the order in which values leave, and how each does (steps 2 to 4)."""
    free_ms = _free_times_ms(candidates)
    by_free_time = sorted(candidates.items, key=lambda item: (-free_ms[item.value], item.value))
    hidden = _hidden(candidates, by_free_time, free_ms)
    taken = {item.value for item in hidden}
    others = [i for i in candidates.items if i.value not in taken and (i.can_swap or i.can_recompute)]
    priced = [(_cheaper(item, free_ms[item.value]), item) for item in others]
    priced.sort(key=lambda pair: (pair[0][0] / max(1, pair[1].memory_bytes), pair[1].value))
    return [*swaps_of(hidden), *((item.value, choice) for (_, choice), item in priced)]


def _free_times_ms(candidates: Candidates) -> dict[int, float]:
    times_ms = candidates.dataflow.op_times_ms
    starts_ms = numpy.concatenate([[0.0], numpy.cumsum(times_ms)])
    free_ms = {}
    for item in candidates.items:
        last = len(times_ms) if item.need == NEVER else item.need
        back_ms = item.in_ms if item.need != NEVER else 0.0
        released = min(item.release + 1, len(times_ms))  # the program may hold it to the end of the step
        free_ms[item.value] = float(starts_ms[last] - back_ms - starts_ms[released] - item.out_ms)
    return free_ms


def _hidden(candidates: Candidates, items: list[Candidate], free_ms: dict[int, float]) -> list[Candidate]:
    """Return the items whose copies are hidden behind compute, as long as the link has time left."""
    profile = candidates.dataflow.profile
    out_left_ms = sum(op.time_ms for op in profile.ops[: profile.forward_ops])
    in_left_ms = sum(op.time_ms for op in profile.ops[profile.forward_ops :])
    hidden = []
    for item in items:
        if item.can_swap and free_ms[item.value] >= 0 and item.out_ms <= out_left_ms and item.in_ms <= in_left_ms:
            hidden.append(item)
            out_left_ms -= item.out_ms
            in_left_ms -= item.in_ms
    return hidden


def _cheaper(item: Candidate, free_ms: float) -> tuple[float, Choice]:
    """Return the lower cost in ms, and its choice. A swap costs its copies, or the free time that it lacks if more."""
    swap_ms = max(item.copy_ms, -free_ms) if item.can_swap else math.inf
    recompute_ms = item.replay_ms if item.can_recompute else math.inf
    return (swap_ms, "swap") if swap_ms <= recompute_ms else (recompute_ms, "recompute")
