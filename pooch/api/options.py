"""How to plan, in one object: what the plans of a guard, a comparison or a batch search have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ground.errors import UsageError
from ..ir import Profile, Region
from ..ir.persistent import Moves
from ..ir.plan import Bound
from ..planner import Effort
from .budgets import FEWEST_BYTES, parse_budget


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Arguments of `pooch.plan` that apply to any profile and any budget.

    Attributes:
        policy: name of the policy that decides.
        policy_options: parameters of the policy, by name.
        host_budget: limit on the bytes that swapped activations take in the swap tier, as `parse_budget` takes it.
            None: no limit.
        time_limit_s: limit on the planning time.
        region: what the plan covers.
        explain: whether to simulate the other choices of each activation.
        effort: how long to search: "full", or "fast" for a good plan after few simulations.
        bound: what the budget bounds: "live" bytes, or the "arena" in which they lie.
        microbatches_in_flight: forward passes at most whose backward pass has not ended, this one included.
        moves: what may leave: "activations", or "all" that the profile knows of what outlives the step as well.

    Raises:
        UsageError: there is no such region, effort or bound; the time limit is not positive; or the number of
            microbatches is not positive, or is given with an arena.
    """

    policy: str = "ilp"
    policy_options: Mapping[str, object] = field(default_factory=dict)
    host_budget: int | str | None = None
    time_limit_s: float = 30.0
    region: Region = "model"
    explain: bool = True
    effort: Effort = "full"
    bound: Bound = "live"
    microbatches_in_flight: int = 1
    moves: Moves = "activations"

    def __post_init__(self) -> None:
        checked_region(self.region)
        if self.moves not in ("activations", "all"):
            raise UsageError(f"{self.moves!r} cannot be told to leave: choose activations or all")
        if self.moves == "all" and (self.bound == "arena" or self.microbatches_in_flight > 1):
            raise UsageError("what outlives a step has no room in an arena, and one microbatch: plan with bound='live'")
        if self.effort not in ("full", "fast"):
            raise UsageError(f"there is no effort {self.effort!r}: choose full or fast")
        if self.bound not in ("live", "arena"):
            raise UsageError(_no_bound(self.bound))
        if not (math.isfinite(self.time_limit_s) and self.time_limit_s > 0):
            raise UsageError(f"the time limit {self.time_limit_s} is not positive: give seconds, such as 30")
        checked_in_flight(self.microbatches_in_flight)
        if self.bound == "arena" and self.microbatches_in_flight > 1:
            raise UsageError("an arena holds one step, not several microbatches in flight: plan with bound='live'")

    def host_bytes(self, profile: Profile) -> int | None:
        """The host budget of one microbatch in bytes; a percentage refers to the in-core peak.

        Each microbatch in flight has room of its own in the tier, so the host budget is shared among them.

        Raises:
            UsageError: the host budget does not parse, or is not positive.
        """
        if self.host_budget is None:
            return None
        fewest_bytes = FEWEST_BYTES if isinstance(self.host_budget, str) else 1  # a number may come from a computation
        all_bytes = parse_budget(self.host_budget, profile.peak_bytes, name="host budget", fewest_bytes=fewest_bytes)
        return all_bytes // profile.in_flight.microbatches

    def profile_in_flight(self, profile: Profile) -> Profile:
        """The profile with the other microbatches in flight.

        Raises:
            UsageError: the profile includes another number of them already.
        """
        return in_flight(profile, self.microbatches_in_flight)


def _no_bound(bound: str) -> str:
    if bound != "reserved":
        return f"there is no bound {bound!r}: choose live or arena"
    return (
        "no plan can tell what PyTorch's caching allocator will reserve: plan with bound='arena', or train under "
        "pooch.auto(model, budget, bound='reserved')"
    )


def plan_options(*, policy_options: Mapping[str, object] | None = None, **others: Any) -> PlanOptions:
    """Options from keyword arguments as `pooch.plan` takes them."""
    return PlanOptions(policy_options=policy_options or {}, **others)


def in_flight(profile: Profile, microbatches: int) -> Profile:
    """The profile while so many microbatches are in flight; one that includes them already is returned as it is.

    Raises:
        UsageError: the number is not positive, the profile includes another number of them already, or FSDP gathers
            parameters in it.
    """
    checked_in_flight(microbatches)
    if max(microbatches, profile.in_flight.microbatches) > 1 and profile.gathered:
        raise UsageError(
            "FSDP gathers parameters in this step, and plans for several microbatches in flight do not cover that: run "
            "the backward pass of each microbatch before the next forward pass, and plan with microbatches_in_flight=1"
        )
    try:
        return profile.with_in_flight(microbatches)
    except ValueError as error:
        raise UsageError(f"{error}: plan with the profile of one microbatch") from None


def checked_in_flight(microbatches: int) -> int:
    """The number of microbatches in flight.

    Raises:
        UsageError: it is not a positive number.
    """
    if not isinstance(microbatches, int) or microbatches < 1:
        raise UsageError(
            f"microbatches_in_flight={microbatches!r}: give how many forward passes of the model precede the backward "
            "pass of the first of them at most, such as 4"
        )
    return microbatches


def checked_region(region: str) -> Region:
    """The region.

    Raises:
        UsageError: there is no such region.
    """
    if region == "model":
        return "model"
    if region == "step":
        return "step"
    raise UsageError(f"there is no region {region!r}: choose model or step")
