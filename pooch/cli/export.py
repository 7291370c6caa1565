"""`pooch export`: a plan for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..ground.errors import UsageError
from ..ground.units import format_bytes, plural
from ..ir import Plan, Profile
from .options import PATH, measure_options, output_option, profile_option, results_options
from .output import print_json, progress_shown, say

if TYPE_CHECKING:
    from ..ir.lives import StepLives
    from ..workloads import WorkloadFactory


@click.command("export")
@click.argument("plan_path", metavar="PLAN.json", type=PATH)
@profile_option()
@output_option(
    "--memory-viz",
    "memory_viz",
    metavar="FILE.pickle",
    required=True,
    help="The memory of the step as a snapshot of torch.cuda.memory, to be dropped into pytorch.org/memory_viz.",
)
@measure_options("Train this under the plan, and show what is measured.", "the workload's own")
@results_options
def command(
    plan_path: Path,
    profile_path: Path | None,
    memory_viz: Path,
    factory: WorkloadFactory | None,
    as_json: bool,
) -> None:
    """Write PLAN.json for other tools.

    Blocks are as the plan predicts them, which needs --profile, or with --measure as they are in a step that is run.
    Each tells what the plan decides about it, and why.
    """
    from ..report.memory_viz import write_memory_viz

    plan = Plan.load(plan_path)
    if factory is None:
        lives = _predicted(plan, profile_path)
    else:
        if profile_path is not None:
            raise UsageError("--profile is for what is predicted, and --measure runs the step: give one of them")
        lives = _measured(plan, factory)
    write_memory_viz(lives, memory_viz)
    if as_json:
        record = {"output": str(memory_viz), "peak_bytes": lives.peak_bytes, "blocks": len(lives.lives)}
        print_json(record | {"measured": factory is not None})
        return
    how = "predicted" if factory is None else "measured"
    say(f"wrote {memory_viz} ({plural(len(lives.lives), 'block')}, peak {format_bytes(lives.peak_bytes)}, {how})")
    say("drop it into https://pytorch.org/memory_viz, which uploads nothing")


def _predicted(plan: Plan, profile_path: Path | None) -> StepLives:
    from ..api.step_lives import lives_of

    if profile_path is None:
        raise UsageError("blocks are predicted from the profile: add --profile P.json, or --measure WORKLOAD")
    return lives_of(Profile.load(profile_path), plan)


def _measured(plan: Plan, factory: WorkloadFactory) -> StepLives:
    from ..api.measure.measured_lives import measured_lives

    with progress_shown() as progress:
        return measured_lives(factory, plan, progress=progress)
