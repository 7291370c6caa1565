"""What an experiment compares: a policy, and what it is let know."""

from __future__ import annotations

from dataclasses import dataclass

from pooch.errors import UsageError
from pooch.ir import Profile
from pooch.session import policy_names


@dataclass(frozen=True, slots=True)
class Method:
    """A column of a table.

    Attributes:
        name: of the column. policy: who decides.
    """

    name: str
    policy: str

    def sees(self, profile: Profile) -> Profile:
        """The profile that it plans."""
        return profile


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in policy_names():
        raise UsageError(f"there is no method {name!r}: choose one of {', '.join(policy_names())}")
    return Method(name, name)
