"""Plan + model -> a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pooch.ir import Plan

if TYPE_CHECKING:
    import torch

    from pooch.executor import Run


def apply(
    plan: Plan,
    model: torch.nn.Module,
    *,
    on_mismatch: Literal["warn", "error"] = "warn",
    spill_directory: str | Path | None = None,
    check_copies: bool = True,
    measure_every: int | None = 1000,
) -> Run:
    """Attach a plan to a model; also a context manager. `run.stats` tells of the last step, `run.totals` of
    all steps, `run.remove()` detaches.

    Args:
        plan: made for this model, in the mode and with the shapes in which it was profiled.
        on_mismatch: when a step leaves the profiled path: "warn" and keep what is left, or "error".
        spill_directory: where the CPU engine's spill file lies (default: POOCH_SPILL_DIRECTORY, or the system's
            directory for temporary files).
        check_copies: compare checksums of what comes back from the spill file with those of what was written, so that
            bytes that a disk changed are an error and never a gradient. It costs about a hundredth of the copy.
        measure_every: on a CPU the peak is measured in the steps 1, 2, 10, 100 and in each so manieth, and where
            something has changed that the plan does not know of; a peak over the budget is told once for each cause.
            None or 0: no step is measured. A GPU's allocator counts by itself, in every step.

    Raises:
        UsageError: the model is compiled, or under a plan already.
        PlanMismatch: the plan was made for another model or device.
        InvalidSchedule: the plan was changed so that it cannot be executed.
        TierError: the swap tier cannot be set up.
    """
    from pooch.executor import apply_plan

    return apply_plan(
        plan,
        model,
        on_mismatch=on_mismatch,
        spill_directory=spill_directory,
        check_copies=check_copies,
        measure_every=measure_every,
    )
