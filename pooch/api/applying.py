"""Plan + model -> a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..ground.errors import UsageError
from ..ir import Plan
from ..ir.arguments import plan_of
from .arenas import arena_for

if TYPE_CHECKING:
    import torch

    from ..executor import Run


def apply(
    plan: Plan | str | Path,
    model: torch.nn.Module,
    *,
    on_mismatch: Literal["warn", "error"] = "warn",
    spill_directory: str | Path | None = None,
    check_copies: bool = True,
    measure_every: int | None = 1000,
    arena: bool = False,
    verify: Literal["always", "first", "off"] = "first",
) -> Run:
    """Attach a plan to a model.

    The run is also a context manager. `run.stats` describes the last step, `run.totals` all steps, and `run.remove()`
    detaches the plan.

    Args:
        plan: made for this model, in the training mode and with the shapes in which it was profiled; or the path of a
            saved plan.
        model: the model.
        on_mismatch: what to do if a step leaves the profiled path: "warn" and go on without the plan, within the
            budget, or raise an "error".
        spill_directory: directory of the CPU engine's spill file (default: POOCH_SPILL_DIRECTORY, or the system's
            directory for temporary files).
        check_copies: compare checksums of what is read from the spill file with those of what was written, so that a
            disk error raises an exception instead of changing a gradient. It costs about 1% of the copy.
        measure_every: on a CPU, the peak is measured in steps 1, 2, 10, 100 and every multiple of this number, and
            after changes that the plan does not know about. There is one warning for each cause of a peak over the
            budget. None or 0: no step is measured. On a GPU, the allocator counts in every step.
        arena: record the memory of the first steps, and serve the following ones from one arena in which their blocks
            are packed. `run.totals.arena` describes it. On a CUDA device, `install_cuda_arena` has to be called first.
            Where there is no arena, one warning says why, and the plan is applied without.
        verify: what is recomputed is compared, byte by byte, with what it replaces. "first": in full, with a copy in
            the swap tier, until that gave the same in two steps; then by a sample in each step, and in full again in
            turns. "always": in full in each step. "off": not at all. `run.verified` says what was found. A difference
            is told in one warning, and costs nothing where there is a copy; without one, the step raises
            `ReplayDiffers`.

    Raises:
        UsageError: one of the two is something else; the model was compiled since it was planned, or is already under a
            plan; parameters or state leave under the plan; the process trains on an arena already; or the plan is for
            several microbatches in flight and an arena is asked for.
        PlanMismatch: the plan was made for another model or device.
        InvalidSchedule: the plan was changed and cannot be executed.
        TierError: the swap tier cannot be set up.
    """
    from ..executor import apply_plan

    plan = plan_of(plan, "apply")
    if arena and plan.microbatches_in_flight > 1:
        raise UsageError("an arena serves one step after another, not several microbatches in flight: leave out arena=")
    memory = arena_for(model) if arena else None
    try:
        return apply_plan(
            plan,
            model,
            on_mismatch=on_mismatch,
            spill_directory=spill_directory,
            check_copies=check_copies,
            measure_every=measure_every,
            memory=memory,
            verify=verify,
        )
    except BaseException:
        if memory is not None:
            memory.close()
        raise
