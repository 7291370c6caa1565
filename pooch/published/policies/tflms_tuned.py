"""Tuning TFLMS's parameters (Imai et al. 2018/19): run the step with many of them and keep the fastest.

Procedure (abstract; the parameters are TFLMS's, read): sweep the number of swapped tensors (`n_tensors`) and the number
of levels by which copies in start before their reader (`lb`), and take what runs fastest on the machine.

Ours: the simulator replaces the machine; the grid (shares between as few as fit and all, powers of two levels ahead);
the axes are swept one after the other, levels first.
"""

from __future__ import annotations

from ...planner.candidates import Candidates
from ...planner.contract import PlanningRequest, PolicyOutcome
from ...planner.search.fixed import leanest_trial, outcome_of
from ...planner.search.trials import Trial, Trials
from .fitting import Leaving, fewest_leaving, swaps_of
from .tflms import late_copies

AHEAD = tuple(2**power for power in range(9))  # levels
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the tensors that do not have to leave


def tflms_tuned(request: PlanningRequest) -> PolicyOutcome:
    """Sweep both parameters in the simulator, and take the fastest.

    Raises:
        InfeasibleBudget: swapping everything is not enough.
    """
    trials = Trials(request, Candidates(request.dataflow))
    leaving = swaps_of(trials.candidates.items)
    fewest = fewest_leaving(trials, leaving) or leanest_trial(trials, dict(leaving), "tflms_tuned")
    ahead = min(AHEAD, key=lambda levels: late_copies(trials, fewest, levels).rank)
    found = [late_copies(trials, fewest, ahead)]
    found += [late_copies(trials, trial, ahead) for trial in _more(trials, leaving, fewest) if trial.fits]
    return outcome_of(trials, min(found, key=lambda trial: trial.rank))


def _more(trials: Trials, leaving: Leaving, fewest: Trial) -> list[Trial]:
    """Return trials that swap more tensors than necessary."""
    least = sum(choice == "swap" for choice in fewest.decisions.values())
    counts = sorted({least + round(share * (len(leaving) - least)) for share in SHARES} - {least})
    return [trials.run(dict(leaving[:count])) for count in counts]
