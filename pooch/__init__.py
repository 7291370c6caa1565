"""Pooch trains a PyTorch model under a byte budget: it keeps, swaps or recomputes each activation of the step.

The stages and their names here::

    profile(forward, model)  ->  plan(profile, budget)  ->  simulate(profile, plan)  |  apply(plan, model)
        Profile: measured            Plan: chosen              Timeline: predicted         a run: executed

One step is measured (`profile`), and an integer program decides what happens to every activation under the budget
(`plan`). The decisions are lowered to a verified schedule, which is both simulated (`simulate`) and executed in your
unchanged training loop (`apply`). Losses, gradients, buffers and random states are bitwise those of plain training, and
the peak stays within the budget.

    >>> profile = pooch.profile(forward, model, optimizer)         # forward: () -> loss
    >>> plan = pooch.plan(profile, budget="60%")                    # of the in-core peak, or "16GiB", or "min"
    >>> with pooch.apply(plan, model):                              # then train as usual
    ...     loss = forward(); loss.backward(); optimizer.step()

Names are imported when they are first used (PEP 562), so `import pooch` is fast, and planning or simulating a saved
profile does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .ground.version import VERSION

if TYPE_CHECKING:
    from . import errors as errors
    from .analysis.costs import activation_costs as activation_costs
    from .api.applying import apply as apply
    from .api.arenas import arena as arena
    from .api.arenas import install_cuda_arena as install_cuda_arena
    from .api.batch_search.max_batch import max_batch as max_batch
    from .api.batch_search.results import MaxBatch as MaxBatch
    from .api.guarding import guard as guard
    from .api.manual import plan_from_decisions as plan_from_decisions
    from .api.planning import plan as plan
    from .api.profiling import profile as profile
    from .api.simulation import simulate as simulate
    from .api.smallest import smallest_budget as smallest_budget
    from .autopilot import Auto as Auto
    from .autopilot import AutoSummary as AutoSummary
    from .autopilot import auto as auto
    from .executor.verification import Verified as Verified
    from .ground.errors import FileFormatError as FileFormatError
    from .ground.errors import InfeasibleBudget as InfeasibleBudget
    from .ground.errors import InvalidSchedule as InvalidSchedule
    from .ground.errors import PlanMismatch as PlanMismatch
    from .ground.errors import PoochError as PoochError
    from .ground.errors import ProfileError as ProfileError
    from .ground.errors import ReplayDiffers as ReplayDiffers
    from .ground.errors import TierError as TierError
    from .ground.errors import UsageError as UsageError
    from .ground.errors import WorkloadError as WorkloadError
    from .ir import Plan as Plan
    from .ir import Profile as Profile
    from .ir import Timeline as Timeline
    from .torchtools.malloc import keep_freed_memory as keep_freed_memory
    from .torchtools.malloc import return_freed_memory as return_freed_memory
    from .torchtools.operators import allow_replay as allow_replay
    from .torchtools.pipeline_stages import StageStep as StageStep
    from .torchtools.pipeline_stages import microbatches_in_flight as microbatches_in_flight
    from .torchtools.pipeline_stages import stage_step as stage_step
    from .workloads import Workload as Workload

__version__ = VERSION

_NAMES = {
    "analysis.costs": ("activation_costs",),
    "api.applying": ("apply",),
    "api.arenas": ("arena", "install_cuda_arena"),
    "api.batch_search.max_batch": ("max_batch",),
    "api.batch_search.results": ("MaxBatch",),
    "api.guarding": ("guard",),
    "api.manual": ("plan_from_decisions",),
    "api.planning": ("plan",),
    "api.profiling": ("profile",),
    "api.simulation": ("simulate",),
    "api.smallest": ("smallest_budget",),
    "autopilot": ("Auto", "AutoSummary", "auto"),
    "errors": (
        "FileFormatError",
        "InfeasibleBudget",
        "InvalidSchedule",
        "PlanMismatch",
        "PoochError",
        "ProfileError",
        "ReplayDiffers",
        "TierError",
        "UsageError",
        "WorkloadError",
    ),
    "executor.verification": ("Verified",),
    "ir": ("Plan", "Profile", "Timeline"),
    "torchtools.malloc": ("keep_freed_memory", "return_freed_memory"),
    "torchtools.operators": ("allow_replay",),
    "torchtools.pipeline_stages": ("StageStep", "microbatches_in_flight", "stage_step"),
    "workloads": ("Workload",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = ["errors", *_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name == "errors":
        return importlib.import_module(".errors", __package__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __package__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names alone, including those that are not imported yet: what completion offers."""
    return sorted([*__all__, "__version__"])
