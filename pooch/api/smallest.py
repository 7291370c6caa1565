"""The smallest budget that a policy is known to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ..analysis.dataflow import Dataflow
from ..analysis.persistence import Cycle, can_move, with_resident
from ..ir import Profile, Region
from ..ir.arguments import profile_of
from ..ir.persistent import Moves
from ..planner import PolicyOutcome
from .arena_fitting import ArenaFitting
from .budgets import is_smallest
from .deciding import decide, own_slices, request_of
from .evaluation import StageEvaluator
from .free_memory import budget_bytes_of
from .hooked import dataflow_of
from .options import PlanOptions
from .plan_checks import check_region_of

UNHURRIED_S = 30.0  # for the smallest budget, whatever the time limit of the plan


def smallest_budget(
    profile: Profile | str | Path,
    *,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget: int | str | None = None,
    region: Region = "model",
    microbatches_in_flight: int = 1,
    moves: Moves = "activations",
) -> int:
    """The smallest budget, in bytes, that the policy is known to keep; asking `plan` for it succeeds.

    Args:
        profile: the measured step, or the path of a saved profile.
        policy: who decides.
        policy_options: parameters of the policy, by name.
        host_budget: bytes that swapped activations may take in the swap tier. None: no limit.
        region: what the plan will cover, "model" or "step".
        microbatches_in_flight: as for `plan`.
        moves: as for `plan`.

    Raises:
        UsageError: the policy, its parameters, the region or the host budget cannot be understood.
    """
    options = PlanOptions(
        policy,
        policy_options or {},
        host_budget,
        region=region,
        microbatches_in_flight=microbatches_in_flight,
        moves=moves,
    )
    return smallest_with(profile_of(profile, "smallest_budget"), options)


def smallest_with(profile: Profile, options: PlanOptions) -> int:
    """`smallest_budget` with its options in one object."""
    profile = options.profile_in_flight(profile)
    check_region_of(profile, options.region)
    split = own_slices(profile, options)
    if split is not None:
        return min(_smallest_of(profile, options), _smallest_of(split, options))
    return _smallest_of(profile, options)


def smallest_moving(profile: Profile, options: PlanOptions) -> int:
    """The smallest budget with all that can leaving: at each point there is what it uses, and nothing else."""
    cycle = Cycle(profile)
    tight = with_resident(profile, cycle.allowed_points(0))
    needed = _smallest_of(tight, replace(options, moves="activations"))
    after_bytes = with_resident(profile).ops[-1].entry_bytes
    slices_bytes = (cycle.need_bytes + cycle.temporary_bytes)[len(profile.ops) :]
    return max(needed, after_bytes + int(slices_bytes.max(initial=0)))


def _smallest_of(profile: Profile, options: PlanOptions) -> int:
    if options.moves == "all" and can_move(profile):
        return min(smallest_moving(profile, options), profile.peak_bytes)
    # As `plan` has it for what does not fit.
    evaluator = StageEvaluator(dataflow_of(profile, options.region, hooked=True))
    needed = _smallest_live_bytes(evaluator, options)
    if options.bound == "arena":
        needed = ArenaFitting(evaluator, 0).total_bytes(leanest(evaluator, options))
        plain = StageEvaluator(Dataflow(profile, options.region))
        in_core = PolicyOutcome({}, plain.evaluate({}, profile.peak_bytes), 0.0)
        return min(needed, ArenaFitting(plain, 0).total_bytes(in_core))
    return min(needed, profile.peak_bytes)


def leanest(evaluator: StageEvaluator, options: PlanOptions) -> PolicyOutcome:
    """The plan for the fewest live bytes that the policy is known to need."""
    from ..planner import SEARCHES

    unhurried = replace(
        options, explain=False, effort="fast" if options.policy in SEARCHES else "full", time_limit_s=UNHURRIED_S
    )
    return decide(evaluator, _smallest_live_bytes(evaluator, options), unhurried)


def _smallest_live_bytes(evaluator: StageEvaluator, options: PlanOptions) -> int:
    from ..planner import smallest_plan_bytes

    request = request_of(evaluator, 1, options, effort="full", time_limit_s=UNHURRIED_S)
    return smallest_plan_bytes(request, options.policy, options.policy_options)


def budget_in_bytes(profile: Profile, budget: float | str, options: PlanOptions) -> int:
    """A budget for the step in bytes; "min" is the smallest that the policy is known to keep.

    Raises:
        UsageError: the budget does not parse, is not positive, or is too small to be meant.
    """
    return smallest_with(profile, options) if is_smallest(budget) else budget_bytes_of(profile, budget)
