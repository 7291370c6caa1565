"""The methods that an experiment compares: a policy, and what it knows of the profile."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ground.errors import UsageError
from ..ground.wording import did_you_mean
from ..ir import Profile
from ..planner import policy_names

WITHIN_BACKWARD = "ilp_backward_only"


@dataclass(frozen=True, slots=True)
class Method:
    """A column of a table.

    Attributes:
        name: of the column.
        policy: makes the decisions.
        empties: whether values may leave while the forward pass still holds them.
    """

    name: str
    policy: str
    empties: bool = True

    def sees(self, profile: Profile) -> Profile:
        """Return the profile that the method plans."""
        return profile if self.empties else without_forward_swaps(profile)


def find_method(name: str) -> Method:
    """Return the method with a name: a policy, or the integer program without swaps within the forward pass.

    Raises:
        UsageError: there is none.
    """
    if name == WITHIN_BACKWARD:
        return Method(name, "ilp", empties=False)
    if name not in policy_names():
        raise UsageError(f"there is no method {name!r}: {did_you_mean(name, (WITHIN_BACKWARD, *policy_names()))}")
    return Method(name, name)


def without_forward_swaps(profile: Profile) -> Profile:
    """Return the same step, but no value may be emptied while the program holds it."""
    return replace(profile, values=tuple(replace(value, touches=None) for value in profile.values))
