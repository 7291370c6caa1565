"""Policies by name: each turns a `PlanningRequest` into a `PolicyOutcome`. One file per policy."""

from __future__ import annotations

from pooch.errors import UsageError
from pooch.planner.contract import Policy
from pooch.planner.policies.ilp import ilp
from pooch.planner.policies.ilp_recompute import ilp_recompute
from pooch.planner.policies.ilp_swap import ilp_swap
from pooch.planner.policies.keep_all import keep_all
from pooch.plugins import provided

OWN: dict[str, Policy] = {
    "ilp": ilp,
    "keep_all": keep_all,
    "ilp_recompute": ilp_recompute,
    "ilp_swap": ilp_swap,
}
ALIASES = {"in_core": "keep_all"}


def policy_names() -> tuple[str, ...]:
    """Every policy once: our own, the integer program first, then those of papers."""
    return (*OWN, *provided("policies"))


def find_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        UsageError: there is none.
    """
    chosen = ALIASES.get(name, name)
    if chosen in OWN:
        return OWN[chosen]
    try:
        found: Policy = provided("policies")[chosen].load()
    except KeyError:
        known = ", ".join(sorted({*policy_names(), *ALIASES}))
        raise UsageError(f"there is no policy {name!r}: choose one of {known}") from None
    return found
