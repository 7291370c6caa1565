"""What planning refuses before it begins."""

from __future__ import annotations

from ..ground.errors import UsageError
from ..ir import Decisions, Profile, Region


def check_region_of(profile: Profile, region: Region) -> None:
    """Refuse the region "model" where the profiled step has no such region.

    Raises:
        UsageError: it has not.
    """
    if region == "model" and profile.model_begin == profile.model_end:
        raise UsageError(
            "the profiled step never calls the model itself (it calls model.forward(...), or parts of the model as "
            "training_step does), so a plan of its calls would do nothing: plan for region 'step' and put the forward "
            "pass into `with run.step():`"
        )


def check_start(profile: Profile, start: Decisions) -> None:
    """Refuse choices to start from that are not for this profile.

    Raises:
        UsageError: a choice does not exist, or is for a value that is no activation.
    """
    check_choices(start)
    for value in start.keys() - {activation.id for activation in profile.activations}:
        raise UsageError(f"the start has a choice for value {value}, which is not an activation of this profile")


def check_choices(decisions: Decisions) -> None:
    """Refuse choices that do not exist.

    Raises:
        UsageError: there is one.
    """
    for value, choice in decisions.items():
        if choice not in ("keep", "swap", "recompute"):
            raise UsageError(f"the decision {choice!r} for value {value} is none of keep, swap, recompute")
