"""Planning as the rest of Pooch calls it: a policy by name, then what every plan carries whatever policy made it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from pooch.analysis.dataflow import Dataflow
from pooch.errors import InfeasibleBudget
from pooch.planner.alternatives import weigh_alternatives
from pooch.planner.candidates import Candidates
from pooch.planner.contract import (
    OPTIMAL_GAP,
    Evaluator,
    PlannedDecisions,
    PlanningRequest,
    PolicyOutcome,
    Progress,
    Status,
)
from pooch.planner.options import with_options
from pooch.planner.policies import find_policy
from pooch.planner.reasons import decision_rows


def make_plan(
    dataflow: Dataflow,
    budget_bytes: int,
    evaluator: Evaluator,
    *,
    policy: str = "ilp",
    host_budget_bytes: int | None = None,
    time_limit_s: float = 30.0,
    progress: Progress | None = None,
    known: Sequence[PolicyOutcome] = (),
    policy_options: Mapping[str, object] | None = None,
    explain: bool = True,
) -> PlannedDecisions:
    """Decide on every activation so that the step fits the budget and is short.

    Args:
        dataflow: the profile, and the region to plan for.
        budget_bytes: bound on all device bytes.
        evaluator: lowering and simulation.
        policy: a name that `policy_names` gives.
        host_budget_bytes: bound on the bytes in the swap tier, None = unlimited.
        time_limit_s: a safety; planning normally ends by itself and earlier.
        progress: called with a text and the share that is done.
        known: plans made before for the same dataflow; where they fit, "ilp" gives nothing slower.

        policy_options: parameters of the policy, such as {"n_tensors": 3} of "tflms".
        explain: also say what other choices would have cost, which takes some hundred simulations.

    Raises:
        UsageError: there is no such policy, or no such parameter.
        InfeasibleBudget: nothing fits; it carries the smallest budget for which a plan is known.
    """
    request = PlanningRequest(
        dataflow, budget_bytes, evaluator, host_budget_bytes, time_limit_s, progress, known=tuple(known)
    )
    outcome = with_options(find_policy(policy), policy, policy_options or {})(request)
    gap = _gap(outcome)
    candidates = Candidates(dataflow)
    alternatives = (
        weigh_alternatives(request, candidates, outcome.decisions, outcome.evaluation)
        if explain and not outcome.interrupted
        else {}
    )
    planned = PlannedDecisions(
        decisions=outcome.decisions,
        schedule=outcome.evaluation.schedule,
        timeline=outcome.evaluation.timeline,
        lower_bound_ms=outcome.lower_bound_ms,
        gap=gap,
        status=_status(outcome, gap),
        notes=outcome.notes,
        rows=decision_rows(candidates, outcome.decisions, alternatives),
        planning_ms=(time.monotonic() - request.started_s) * 1000,
    )
    request.report("planned", 1.0)
    return planned


def make_plans(
    dataflow: Dataflow,
    budgets_bytes: Iterable[int],
    evaluator: Evaluator,
    *,
    host_budget_bytes: int | None = None,
    time_limit_s: float = 30.0,
) -> dict[int, PlannedDecisions]:
    """Plans under several budgets, smallest first; each knows those before it, so more memory is never slower.

    Budgets that nothing fits into are left out.
    """
    plans: dict[int, PlannedDecisions] = {}
    for budget_bytes in sorted(set(budgets_bytes)):
        with suppress(InfeasibleBudget):
            plans[budget_bytes] = make_plan(
                dataflow,
                budget_bytes,
                evaluator,
                host_budget_bytes=host_budget_bytes,
                time_limit_s=time_limit_s,
                known=tuple(plan.outcome for plan in plans.values()),
            )
    return plans


def _gap(outcome: PolicyOutcome) -> float:
    """Share of the step that might be saved at most."""
    step_ms = outcome.evaluation.timeline.step_ms
    return max(0.0, step_ms - outcome.lower_bound_ms) / step_ms if step_ms > 0 else 0.0


def _status(outcome: PolicyOutcome, gap: float) -> Status:
    if gap <= OPTIMAL_GAP:
        return "optimal"
    return "feasible" if outcome.proven else "heuristic"
