"""Planning in a child process, which returns all the memory that it took when it ends."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from ..ir import Decisions, Plan, Profile
from ..progress import PlanningProgress, silent
from .children import run_child
from .options import PlanOptions

JOB, PLAN = "job.pickle", "plan.pickle"  # JSON would take a library and several times the memory to be read here
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
    try:
        job = pickle.dumps((profile, budget, options, tuple(known), None if start is None else dict(start)))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
    with ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="pooch-")))
            (folder / JOB).write_bytes(job)
        except OSError:
            return None
        del job
        if run_child(f"{__package__}.planning_child", {"folder": str(folder)}, progress or silent) is None:
            return None
        plan: Plan = pickle.loads((folder / PLAN).read_bytes())
        return plan
