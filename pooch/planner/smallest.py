"""The smallest budget under which a policy is known to succeed, asked for without a budget in mind."""

from __future__ import annotations

from collections.abc import Mapping

from pooch.analysis.dataflow import Dataflow
from pooch.errors import InfeasibleBudget
from pooch.planner.candidates import Candidates
from pooch.planner.contract import Evaluator, PlanningRequest
from pooch.planner.options import with_options
from pooch.planner.policies import find_policy
from pooch.planner.search.leanest import leanest_plan
from pooch.planner.search.trials import Trials


def smallest_budget(
    dataflow: Dataflow,
    evaluator: Evaluator,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget_bytes: int | None = None,
) -> int:
    """Bytes that the policy was seen to keep, and found no way below.

    Of "ilp" it is what the leanest decisions need; asking for that many bytes is answered with a plan. Another policy
    is asked for a plan in one byte, and its refusal names the budget.

    Raises:
        UsageError: there is no such policy, or it has no such parameter.
    """
    chosen = with_options(find_policy(policy), policy, policy_options or {})
    request = PlanningRequest(dataflow, 1, evaluator, host_budget_bytes)
    if policy == "ilp":
        return leanest_plan(Trials(request, Candidates(dataflow))).budget_bytes
    try:
        return chosen(request).evaluation.timeline.peak_bytes
    except InfeasibleBudget as error:
        return error.minimum_bytes
