"""The plans that the page's slider chooses from: the one given, and the same step planned under other budgets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from ...api.options import PlanOptions
from ...api.planning import plan_with
from ...api.smallest import budget_in_bytes, smallest_with
from ...ground.errors import InfeasibleBudget, UsageError
from ...ground.progress import PlanningProgress
from ...ground.units import format_bytes
from ...ground.visible import one_line
from ...ir import Plan, Profile
from ...planner import policy_names

MOST_BUDGETS = 50
_MOST_DIGITS = 18  # of a count
_PARAMETER = re.compile(r"(\w+)=([^,]+)")


@dataclass(frozen=True, slots=True)
class BudgetPlans:
    """Plans of one step under several budgets.

    Attributes:
        plans: by ascending budget, the given one among them.
        given: index of the given plan.
        notes: what the reader should know about how the others were planned.
    """

    plans: tuple[Plan, ...]
    given: int
    notes: tuple[str, ...]


def parse_budgets(text: str) -> int | tuple[str, ...]:
    """Read `--budgets`: a count such as "9", or a list such as "60%,800MB".

    Raises:
        UsageError: the text is neither.
    """
    if text.strip().isdecimal():
        if len(text) > _MOST_DIGITS:
            raise _too_many(one_line(text))
        return int(text)
    budgets = tuple(each.strip() for each in text.split(","))
    if not all(budgets):
        raise UsageError(f"--budgets {text!r} does not parse: give a count such as 9, or a list such as 60%,800MB")
    return budgets


def plan_budgets(
    profile: Profile,
    given: Plan,
    budgets: int | Sequence[int | str],
    *,
    host_budget: int | str | None,
    time_limit_s: float,
    progress: PlanningProgress | None,
) -> BudgetPlans:
    """Plan the step under other budgets, by `write_report`'s arguments, and otherwise as the given plan: with the same
    policy and region, for as many microbatches, with the same bytes bounded and the same kinds of tensors leaving.

    Raises:
        UsageError: a budget, the host budget or the time limit cannot be understood, or there are too many budgets.
    """
    policy, options = _policy_of(given)
    notes = [] if given.policy.startswith(policy) else [f"The other budgets were planned by {policy}."]
    how = PlanOptions(
        policy,
        options,
        host_budget,
        time_limit_s,
        given.region,
        bound=given.bound,
        microbatches_in_flight=given.microbatches_in_flight,
        moves="activations" if given.persistent is None else "all",
    )
    known = [given]
    asked = _budgets_in_bytes(profile, budgets, how) - {given.budget_bytes}
    for done, budget_bytes in enumerate(sorted(asked)):
        name = f"budget {done + 1} of {len(asked)}, {format_bytes(budget_bytes)}"
        inner = None if progress is None else _part_of(progress, name, done, len(asked))
        try:
            plan = plan_with(profile, budget_bytes, how, known=known, progress=inner)
        except InfeasibleBudget as error:
            notes.append(f"No plan under {format_bytes(budget_bytes)}: {error}.")
        else:
            known.append(plan)
    plans = tuple(sorted(known, key=lambda plan: plan.budget_bytes or plan.predicted_peak_bytes))
    return BudgetPlans(plans, plans.index(given), tuple(notes))


def _policy_of(plan: Plan) -> tuple[str, dict[str, object]]:
    """The policy and its parameters, from the name that the plan has for it; the integer program for hand-made ones."""
    name, _, parameters = plan.policy.rstrip(")").partition("(")
    if name not in policy_names():
        return "ilp", {}
    return name, dict(_PARAMETER.findall(parameters))


def _budgets_in_bytes(profile: Profile, budgets: int | Sequence[int | str], how: PlanOptions) -> set[int]:
    count = budgets if isinstance(budgets, int) else len(budgets)
    if count > MOST_BUDGETS:
        raise _too_many(count)
    if not isinstance(budgets, int):
        return {budget_in_bytes(profile, budget, how) for budget in budgets}
    if count == 0:
        return set()
    return {int(each) for each in numpy.linspace(smallest_with(profile, how), profile.peak_bytes, count)}


def _too_many(count: object) -> UsageError:
    return UsageError(f"{count} budgets make the page too large: give at most {MOST_BUDGETS}")


def _part_of(progress: PlanningProgress, name: str, done: int, count: int) -> PlanningProgress:
    return lambda text, share: progress(f"{name}: {text}", (done + share) / count)
