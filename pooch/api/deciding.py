"""Asks the policies: what they are asked under the options of a plan."""

from __future__ import annotations

from typing import Any

from ..ir import Profile
from ..planner import PlanningRequest, PolicyOutcome
from .evaluation import StageEvaluator
from .options import PlanOptions
from .splitting import in_slices


def decide(evaluator: StageEvaluator, budget_bytes: int, options: PlanOptions, **others: Any) -> PolicyOutcome:
    """Ask the policy; `others` are further fields of the request."""
    from ..planner import make_plan

    request = request_of(evaluator, budget_bytes, options, **others)
    return make_plan(request, options.policy, options.policy_options, explain=options.explain)


def request_of(evaluator: StageEvaluator, budget_bytes: int, options: PlanOptions, **others: Any) -> PlanningRequest:
    """What a policy is asked under the options, from now on."""
    fields: dict[str, Any] = {"time_limit_s": options.time_limit_s, "effort": options.effort, **others}
    host_bytes = options.host_bytes(evaluator.dataflow.profile)
    return PlanningRequest(evaluator.dataflow, budget_bytes, evaluator, host_bytes, **fields)


def own_slices(profile: Profile, options: PlanOptions) -> Profile | None:
    """The step in slices, if there is one and the policy is ours: published methods do not know of it."""
    from ..planner import SEARCHES

    return in_slices(profile, options.region) if options.policy in SEARCHES else None
