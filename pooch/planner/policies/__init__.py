"""Policies by name: each turns a `PlanningRequest` into a `PolicyOutcome`."""

from __future__ import annotations

from functools import partial

from ...ground.errors import UsageError
from ...ground.plugins import provided
from ...ground.wording import did_you_mean
from ...ir.plan import Decisions
from ..contract import Effort, PlanningRequest, Policy, PolicyOutcome
from ..search.outcomes import fixed_outcome
from ..search.search import restricted, search
from .online import online


def keep_all(request: PlanningRequest) -> PolicyOutcome:
    """Plain training: everything stays on the device.

    Raises:
        InfeasibleBudget: the in-core peak is over the budget.
    """
    return fixed_outcome(request, {}, "keep_all")


OWN: dict[str, Policy] = {
    "ilp": search,
    "keep_all": keep_all,
    # The integer program with recomputation alone: what Checkmate (Jain et al. 2019) and its successors would find.
    # Checkmate (abstract; its code recalled) chooses which values are recomputed when, optimally under a budget, with
    # O(T^2) binaries. Ours are the slots of replays (each value once, at its first need); Checkmate may compute a
    # value several times.
    "ilp_recompute": partial(restricted, only="recompute"),
    # The integer program with swaps alone: what the optimising swap planners would find, among them window scheduling
    # (Sony 2020) and the swap parts of POET (2022) and OffMate (2024; abstracts).
    "ilp_swap": partial(restricted, only="swap"),
    "online": online,
}
SEARCHES = ("ilp", "ilp_recompute", "ilp_swap")  # the policies that have an effort and take a start
ALIASES = {"in_core": "keep_all"}  # as PoocH (Ito et al. 2019) calls it


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
        known = sorted({*policy_names(), *ALIASES})
        raise UsageError(f"there is no policy {name!r}: {did_you_mean(name, known)}") from None
    return found


def check_searches(name: str, effort: Effort, start: Decisions | None) -> None:
    """Refuse an effort or a start for a policy that decides in one way only.

    Raises:
        UsageError: the policy is none of those that search.
    """
    given = "effort" if effort != "full" else "start" if start is not None else None
    if given is not None and ALIASES.get(name, name) not in SEARCHES:
        raise UsageError(f"policy {name!r} has no {given}: leave it out, or choose one of {', '.join(SEARCHES)}")
