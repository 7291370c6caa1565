"""Planning in a child process, which returns all the memory that it took when it ends."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..ground.errors import ProcessEnded, WireError
from ..ground.progress import PlanningProgress, silent
from ..ir import Decisions, Plan, Profile
from .children import Child
from .options import PlanOptions

FEWEST_OPS = 256  # of a step; a smaller one is planned in less time than it takes to start a process


def is_worthwhile(profile: Profile) -> bool:
    """Whether planning here would leave the solver, its libraries and a torn heap behind in a process that trains."""
    return "torch" in sys.modules and len(profile.ops) >= FEWEST_OPS


def plan_in_child(
    profile: Profile,
    budget: int | str,
    options: PlanOptions,
    known: Sequence[Plan],
    start: Decisions | None,
    progress: PlanningProgress | None,
) -> Plan | None:
    """Plan in a child process; the arguments are those of `plan_with`.

    Returns:
        The plan; None where there can be no such process, or it ended without a plan.

    Raises:
        PoochError: as `plan_with`.
        KeyboardInterrupt: Ctrl-C was pressed before any plan fitted; later the best plan so far is the answer.
    """
    begin = None if start is None else dict(start)
    try:
        with Child("make a plan") as child:
            plan: Plan = child.ask(profile, budget, options, tuple(known), begin, progress=progress or silent)
    except (WireError, ProcessEnded):
        return None
    return plan
