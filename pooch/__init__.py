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
    from pooch.analysis.costs import activation_costs
    from pooch.api.applying import apply
    from pooch.api.guarding import guard
    from pooch.api.planning import plan, smallest_budget
    from pooch.api.profiling import profile
    from pooch.api.simulation import simulate
    from pooch.batch_search.max_batch import max_batch
    from pooch.batch_search.results import MaxBatch
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
    from pooch.workloads import Workload

__version__ = "0.1.0"

_HOMES = {
    "activation_costs": "analysis.costs",
    "profile": "api.profiling",
    "plan": "api.planning",
    "plan_from_decisions": "api.planning",
    "smallest_budget": "api.planning",
    "simulate": "api.simulation",
    "apply": "api.applying",
    "guard": "api.guarding",
    "max_batch": "batch_search.max_batch",
    "MaxBatch": "batch_search.results",
    "Profile": "ir",
    "Plan": "ir",
    "Timeline": "ir",
    "Workload": "workloads",
    "PoochError": "errors",
    "UsageError": "errors",
    "ProfileError": "errors",
    "WorkloadError": "errors",
    "InfeasibleBudget": "errors",
    "InvalidSchedule": "errors",
    "PlanMismatch": "errors",
    "TierError": "errors",
    "FileFormatError": "errors",
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
    "activation_costs",
    "apply",
    "errors",
    "guard",
    "max_batch",
    "plan",
    "plan_from_decisions",
    "profile",
    "simulate",
    "smallest_budget",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its home on first use."""
    if name == "errors":
        return importlib.import_module(".errors", __package__)
    if name not in _HOMES:
        raise AttributeError(f"module 'pooch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __package__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, also those not loaded yet."""
    return sorted({*globals(), *__all__})


refuse_other_pooch(__path__)
