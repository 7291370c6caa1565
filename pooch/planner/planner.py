"""Planning as the rest of Pooch calls it: plans by any policy, the smallest budget, the program as a file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..analysis.dataflow import Dataflow
from ..errors import InfeasibleBudget
from ..ir.plan import Decisions
from ..progress import PlanningProgress
from .candidates import Candidates
from .contract import Effort, Evaluator, PlanningRequest, PolicyOutcome
from .options import with_options
from .policies import check_searches, find_policy
from .reasons import decision_rows, weigh_alternatives
from .search.leanest import leanest_plan
from .search.programs import Programs
from .search.trials import Remembering, Trials


def make_plan(
    dataflow: Dataflow,
    budget_bytes: int,
    evaluator: Evaluator,
    *,
    policy: str = "ilp",
    host_budget_bytes: int | None = None,
    time_limit_s: float = 30.0,
    progress: PlanningProgress | None = None,
    known: Sequence[PolicyOutcome] = (),
    policy_options: Mapping[str, object] | None = None,
    explain: bool = True,
    effort: Effort = "full",
    start: Decisions | None = None,
) -> PolicyOutcome:
    """Decide on every activation so that the step fits the budget and is short.

    Args:
        dataflow: the profile, and the region to plan for.
        budget_bytes: bound on all device bytes.
        evaluator: lowering and simulation.
        policy: a name that `policy_names` gives.
        host_budget_bytes: bound on the bytes in the swap tier; None: unlimited.
        time_limit_s: a safety net; planning normally ends by itself and earlier.
        progress: called with a text and the share that is done.
        known: plans made before for the same dataflow; where they fit, "ilp" gives nothing slower.
        policy_options: parameters of the policy, such as {"n_tensors": 3} of "tflms".
        explain: also say what other choices would have cost, which takes some hundred simulations; with effort "fast"
            that is left out.
        effort: "fast" is content with a good plan, of the policies that are ours.
        start: choices to start from, of the same policies; where they fit, the plan is not slower.

    Raises:
        UsageError: there is no such policy, or no such parameter, or the policy has neither effort nor start.
        InfeasibleBudget: nothing fits; it carries the smallest budget for which a plan is known.
    """
    request = PlanningRequest(
        dataflow,
        budget_bytes,
        Remembering(evaluator, dataflow.end),
        host_budget_bytes,
        time_limit_s,
        progress,
        known=tuple(known),
        effort=effort,
        start=start,
    )
    check_searches(policy, effort, start)
    planned = with_options(find_policy(policy), policy, policy_options or {})(request)
    candidates = Candidates(dataflow)
    weighs = explain and effort == "full" and not planned.interrupted
    alternatives = weigh_alternatives(request, candidates, planned) if weighs else {}
    rows = decision_rows(candidates, planned.decisions, alternatives)
    request.report("planned", 1.0)
    return replace(planned, rows=rows, planning_ms=(time.monotonic() - request.started_s) * 1000)


def smallest_plan_bytes(
    dataflow: Dataflow,
    evaluator: Evaluator,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget_bytes: int | None = None,
) -> int:
    """The smallest budget, in bytes, under which the policy is known to have a plan.

    For "ilp" it is what the leanest decisions need. Another policy is asked for a plan in one byte, and its refusal
    names the budget.

    Raises:
        UsageError: there is no such policy, or it has no such parameter.
    """
    chosen = with_options(find_policy(policy), policy, policy_options or {})
    request = PlanningRequest(dataflow, 1, evaluator, host_budget_bytes)
    if policy == "ilp":
        return leanest_plan(Trials(request)).budget_bytes
    try:
        return chosen(request).evaluation.timeline.peak_bytes
    except InfeasibleBudget as error:
        return error.minimum_bytes


def write_program(
    dataflow: Dataflow, budget_bytes: int, evaluator: Evaluator, path: Path, host_budget_bytes: int | None = None
) -> None:
    """Write the program whose optimum is the lower bound for a budget, in CPLEX's LP format.

    Names of variables and rows are those of docs/planner.md.
    """
    request = PlanningRequest(dataflow, budget_bytes, evaluator, host_budget_bytes)
    Programs(Trials(request)).relaxation().problem.writeLP(str(path))
