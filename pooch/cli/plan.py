"""`pooch plan`: make a plan from a saved profile and a budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import (
    PATH,
    budget_option,
    in_flight_option,
    moves_option,
    output_option,
    planning_options,
    ranks_option,
    results_options,
)
from .output import print_json, print_tables, print_written, progress_shown, say

if TYPE_CHECKING:
    from ..api.options import PlanOptions
    from ..ir.persistent import Moves


@click.command("plan")
@click.argument("profile_path", metavar="P.json", type=PATH)
@budget_option
@output_option(help="Where to write the plan.")
@planning_options(region="model")
@in_flight_option
@moves_option
@ranks_option
@output_option("--write-lp", "lp_path", help="Also write the integer program as an LP file.")
@results_options
def command(
    profile_path: Path,
    budget: str,
    output: Path | None,
    options: PlanOptions,
    microbatches_in_flight: int,
    moves: Moves,
    ranks: int,
    lp_path: Path | None,
    as_json: bool,
) -> None:
    """Choose keep, swap or recompute for every activation of profile P.json."""
    from ..api.planning import plan_with, write_lp
    from ..ir import Profile
    from ..report.summaries import plan_record
    from ..report.tables import choices_table, moves_table, plan_table
    from ..report.verdict import plan_verdict

    options = replace(options, microbatches_in_flight=microbatches_in_flight, moves=moves)
    profile = Profile.load(profile_path).shared_by(ranks)
    with progress_shown(everything=options.time_limit_s) as progress:
        plan = plan_with(profile, budget, options, progress=progress)
    if output is not None:
        plan.save(output)
    if lp_path is not None:
        write_lp(profile, plan.budget_bytes, options, lp_path)
    if as_json:
        print_json(plan_record(plan) | {"output": str(output) if output else None})
    else:
        say(plan_verdict(plan))
        moved = [] if plan.persistent is None else [moves_table(plan.persistent)]
        print_tables(plan_table(plan), choices_table(plan), *moved)
        print_written(output)
