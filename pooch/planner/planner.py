"""Planning as the rest of Pooch calls it: plans by any policy, the smallest budget, the program as a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..ground.errors import InfeasibleBudget
from .candidates import Candidates
from .contract import PlanningRequest, PolicyOutcome
from .options import with_options
from .policies import check_searches, find_policy
from .reasons import decision_rows, weigh_alternatives
from .search.leanest import leanest_plan
from .search.programs import Programs
from .search.trials import Remembering, Trials


def make_plan(
    request: PlanningRequest,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    *,
    explain: bool = True,
) -> PolicyOutcome:
    """Decide on every activation so that the step fits the budget and is short.

    Args:
        request: what to plan.
        policy: a name that `policy_names` gives.
        policy_options: parameters of the policy, such as {"n_tensors": 3} of "tflms".
        explain: also say what other choices would have cost, which takes some hundred simulations; with effort "fast"
            that is left out.

    Raises:
        UsageError: there is no such policy, or no such parameter, or the policy has neither effort nor start.
        InfeasibleBudget: nothing fits; it carries the smallest budget for which a plan is known.
    """
    request = replace(request, evaluator=Remembering(request.evaluator, request.dataflow.end))
    check_searches(policy, request.effort, request.start)
    planned = with_options(find_policy(policy), policy, policy_options or {})(request)
    candidates = Candidates(request.dataflow)
    weighs = explain and request.effort == "full" and not planned.interrupted
    alternatives = weigh_alternatives(request, candidates, planned) if weighs else {}
    rows = decision_rows(candidates, planned.decisions, alternatives)
    request.report("planned", 1.0)
    return replace(planned, rows=rows, planning_ms=(time.monotonic() - request.started_s) * 1000)


def smallest_plan_bytes(
    request: PlanningRequest, policy: str = "ilp", policy_options: Mapping[str, object] | None = None
) -> int:
    """The smallest budget, in bytes, under which the policy is known to have a plan, whatever budget is requested.

    For "ilp" it is what the leanest decisions need. Another policy is asked for a plan in one byte, and its refusal
    names the budget.

    Raises:
        UsageError: there is no such policy, or it has no such parameter.
    """
    chosen = with_options(find_policy(policy), policy, policy_options or {})
    request = replace(request, budget_bytes=1)
    if policy == "ilp":
        return leanest_plan(Trials(request)).budget_bytes
    try:
        return chosen(request).evaluation.timeline.peak_bytes
    except InfeasibleBudget as error:
        return error.minimum_bytes


def write_program(request: PlanningRequest, path: Path) -> None:
    """Write the program whose optimum is the lower bound for a budget, in CPLEX's LP format.

    Names of variables and rows are those of docs/planner.md.
    """
    Programs(Trials(request)).relaxation().problem.writeLP(str(path))
