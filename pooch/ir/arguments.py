"""Profiles and plans as callers give them: as objects, or as the files in which they are kept."""

from __future__ import annotations

import os
from pathlib import Path

from ..ground.errors import UsageError
from .plan import Plan
from .profile import Profile

PROFILE_FIRST = "profile the step first, profile = pooch.profile(forward, model), and give that"
PLAN_FIRST = "plan it first, plan = pooch.plan(profile, budget), and give that"


def profile_of(given: object, function: str) -> Profile:
    """The profile that a function was given.

    Args:
        given: a profile, or the path of a saved one.
        function: name of the function, for the error.

    Raises:
        UsageError: it is something else.
        FileFormatError: the file cannot be read, or holds no profile.
    """
    if isinstance(given, str | os.PathLike):
        return Profile.load(Path(given))
    if isinstance(given, Profile):
        return given
    remedy = "the profile comes first, then the plan" if isinstance(given, Plan) else PROFILE_FIRST
    raise UsageError(f"{function}() takes a profile, or the path of one, not {_kind_of(given)}: {remedy}")


def plan_of(given: object, function: str) -> Plan:
    """The plan that a function was given.

    Args:
        given: a plan, or the path of a saved one.
        function: name of the function, for the error.

    Raises:
        UsageError: it is something else.
        FileFormatError: the file cannot be read, or holds no plan.
    """
    if isinstance(given, str | os.PathLike):
        return Plan.load(Path(given))
    if isinstance(given, Plan):
        return given
    remedy = PLAN_FIRST if isinstance(given, Profile) else f"give what pooch.plan returned, as in {_USES[function]}"
    raise UsageError(f"{function}() takes a plan, or the path of one, not {_kind_of(given)}: {remedy}")


_USES = {
    "apply": "pooch.apply(plan, model)",
    "simulate": "pooch.simulate(profile, plan)",
    "guard": "pooch.guard(profile, budget, model, plan=plan)",
}


def _kind_of(given: object) -> str:
    kind = type(given)
    return f"a {kind.__name__}" if kind.__module__ != "builtins" else repr(kind.__name__)
