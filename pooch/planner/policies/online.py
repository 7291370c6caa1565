"""A step that evicts by a rule while it runs, as a policy: the choices that it came to are made into a plan.

The run is simulated on the profile (`simulator/online.py`). The plan says of each activation how it left the last
time, and is lowered and scored like any other. It knows ahead what will leave, so it copies earlier and replays each
value once. The run's own time is in the notes.

A schedule makes each value again once, where a run may drop it again; so the budget of a run may be too small for the
plan of its choices. The policy succeeds where both keep it.
"""

from __future__ import annotations

from ...ground.units import format_ms
from ...ir.timeline import OnlineStep
from ..contract import MakeRule, PlanningRequest, PolicyOutcome
from ..search.outcomes import outcome_of, with_smallest_budget
from ..search.trials import Trials


def online(request: PlanningRequest) -> PolicyOutcome:
    """Evict by Pooch's rule.

    Raises:
        InfeasibleBudget: the run exceeds the budget, or the plan of its choices does; the minimum was tried.
    """
    return online_outcome(request, None, "online")


def online_outcome(request: PlanningRequest, make_rule: MakeRule | None, policy: str) -> PolicyOutcome:
    """The plan of the choices that a run by some rule comes to.

    Args:
        request: what is asked.
        make_rule: the rule of one run; None: Pooch's own.
        policy: name, for errors.

    Raises:
        InfeasibleBudget: the run exceeds the budget, or the plan of its choices does; the minimum was tried.
    """
    return with_smallest_budget(request, lambda asked: _attempt(asked, make_rule), policy)


def _attempt(request: PlanningRequest, make_rule: MakeRule | None) -> PolicyOutcome | None:
    run = request.evaluator.run_online(request.budget_bytes, request.host_budget_bytes, make_rule)
    if not run.feasible:
        return None
    trials = Trials(request)
    trial = trials.run(run.decisions)
    return outcome_of(trials, trial, (told(run),)) if trial.fits else None


def told(run: OnlineStep) -> str:
    """The run in one line."""
    return (
        f"evicting while it runs takes {format_ms(run.step_ms)}: {run.evictions} evictions, "
        f"{run.replays} ops replayed, {run.copies_out} copies out and {run.copies_in} in, "
        f"{format_ms(run.stall_ms)} waiting for copies"
    )
