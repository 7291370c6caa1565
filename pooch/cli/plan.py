"""`pooch plan`: a saved profile and a budget become a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pooch.cli.options import (
    PATH,
    budget_option,
    force_option,
    json_option,
    options_of_policy,
    output_option,
    planning_options,
    ranks_option,
    refuse_overwriting,
    region_option,
)
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("plan")
@click.argument("profile_path", metavar="P.json", type=PATH)
@budget_option
@output_option("Where to write the plan.")
@planning_options
@ranks_option
@region_option("model")
@click.option("--write-lp", "lp_path", metavar="FILE", type=PATH, help="Also write the integer program as an LP file.")
@json_option
@force_option
def command(
    profile_path: Path,
    budget: str,
    output: Path | None,
    ranks: int,
    policy_options: tuple[str, ...],
    lp_path: Path | None,
    as_json: bool,
    force: bool,
    **planning: Any,
) -> None:
    """Choose keep, swap or recompute for every activation of profile P.json."""
    from pooch.api.planning import plan as make_plan
    from pooch.api.planning import write_lp
    from pooch.ir import Profile

    refuse_overwriting(output, force)
    refuse_overwriting(lp_path, force)
    profile = Profile.load(profile_path).shared_by(ranks)
    options = options_of_policy(policy_options, planning["policy"])
    with progress_shown() as progress:
        plan = make_plan(profile, budget, policy_options=options, progress=progress, **planning)
    if output is not None:
        plan.save(output)
    if lp_path is not None:
        write_lp(profile, plan.budget_bytes, lp_path, host_budget=planning["host_budget"], region=planning["region"])
    if as_json:
        from pooch.report.summaries import plan_record

        print_json(plan_record(plan) | {"output": str(output) if output else None})
        return
    from pooch.report.tables import choices_table, plan_table

    print_tables(plan_table(plan), choices_table(plan))
    if output is not None:
        click.echo(f"wrote {output}")
