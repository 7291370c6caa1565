"""The methods that an experiment compares: a policy, and what it knows of the profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ..ground.errors import UsageError
from ..ground.wording import did_you_mean
from ..ir import Profile
from ..planner import policy_names

WITHIN_BACKWARD = "ilp_backward_only"
IN_SLICES = "ilp_loss_in_slices"


@dataclass(frozen=True, slots=True)
class Method:
    """A column of a table.

    Attributes:
        name: of the column.
        policy: makes the decisions.
        empties: whether values may leave while the forward pass still holds them.
        slices: whether the loss may run in slices. Else it stays whole, as in the papers.
    """

    name: str
    policy: str
    empties: bool = True
    slices: bool = False

    def sees(self, profile: Profile) -> Profile:
        """Return the profile that the method plans."""
        if not self.slices and profile.split is not None:
            profile = replace(profile, split=None)
        return profile if self.empties else without_forward_swaps(profile)


# The integer program without swaps within the forward pass, and with losses that run in slices of rows.
VARIANTS: Final = {
    WITHIN_BACKWARD: Method(WITHIN_BACKWARD, "ilp", empties=False),
    IN_SLICES: Method(IN_SLICES, "ilp", slices=True),
}


def find_method(name: str) -> Method:
    """Return the method with a name: a policy, or one of `VARIANTS`.

    Raises:
        UsageError: there is none.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    if name not in policy_names():
        raise UsageError(f"there is no method {name!r}: {did_you_mean(name, (*VARIANTS, *policy_names()))}")
    return Method(name, name)


def without_forward_swaps(profile: Profile) -> Profile:
    """Return the same step, but no value may be emptied while the program holds it."""
    return replace(profile, values=tuple(replace(value, touches=None) for value in profile.values))
