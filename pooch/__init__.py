"""Pooch trains a PyTorch model under a byte budget: it keeps, swaps or recomputes each activation of the step.

The pipeline, and the name of each stage here::

    profile(forward, model)  ->  plan(profile, budget)  ->  simulate(profile, plan)  |  apply(plan, model)
        Profile: measured            Plan: chosen              Timeline: predicted         a run: executed

One step is measured (`profile`), an integer program decides what happens to every activation under the budget
(`plan`), the decision is lowered to a verified schedule that comes with the plan, and that schedule is what gets
simulated (`simulate`) and what gets executed in your unchanged training loop (`apply`). Losses, gradients, buffers
and random state are bitwise those of plain training; the peak stays within the budget.

    >>> profile = pooch.profile(forward, model, optimizer)         # forward: () -> loss
    >>> plan = pooch.plan(profile, budget="60%")                    # of the in-core peak, or "16GiB", or "min"
    >>> with pooch.apply(plan, model):                              # then train as always
    ...     loss = forward(); loss.backward(); optimizer.step()

Names are loaded when they are first used (PEP 562), so `import pooch` is quick, and planning or simulating a saved
profile never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pooch._identity import refuse_other_pooch

if TYPE_CHECKING:
    from pooch import errors as errors
    from pooch.errors import (
        FileFormatError,
        InfeasibleBudget,
        InvalidSchedule,
        PlanMismatch,
        PoochError,
        ProfileError,
        TierError,
        UsageError,
        WorkloadError,
    )
    from pooch.ir import Plan, Profile, Timeline
    from pooch.session import MaxBatch, apply, guard, max_batch, plan, profile, simulate, smallest_budget
    from pooch.workloads import Workload

__version__ = "0.1.0"

_HOMES = {
    "profile": "pooch.session",
    "plan": "pooch.session",
    "simulate": "pooch.session",
    "smallest_budget": "pooch.session",
    "apply": "pooch.session",
    "max_batch": "pooch.session",
    "MaxBatch": "pooch.session",
    "guard": "pooch.session",
    "Profile": "pooch.ir",
    "Plan": "pooch.ir",
    "Timeline": "pooch.ir",
    "Workload": "pooch.workloads",
    "PoochError": "pooch.errors",
    "UsageError": "pooch.errors",
    "ProfileError": "pooch.errors",
    "WorkloadError": "pooch.errors",
    "InfeasibleBudget": "pooch.errors",
    "InvalidSchedule": "pooch.errors",
    "PlanMismatch": "pooch.errors",
    "TierError": "pooch.errors",
    "FileFormatError": "pooch.errors",
}

__all__ = [
    "FileFormatError",
    "InfeasibleBudget",
    "InvalidSchedule",
    "MaxBatch",
    "Plan",
    "PlanMismatch",
    "PoochError",
    "Profile",
    "ProfileError",
    "TierError",
    "Timeline",
    "UsageError",
    "Workload",
    "WorkloadError",
    "apply",
    "errors",
    "guard",
    "max_batch",
    "plan",
    "profile",
    "simulate",
    "smallest_budget",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name == "errors":
        return importlib.import_module("pooch.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'pooch' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those not loaded yet."""
    return sorted({*globals(), *__all__})


refuse_other_pooch(__path__)
