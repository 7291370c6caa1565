"""`pooch plan`: a saved profile and a budget become a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pooch.cli.options import (
    PATH,
    force_option,
    json_option,
    output_option,
    planning_options,
    refuse_overwriting,
    region_option,
)
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("plan")
@click.argument("profile_path", metavar="P.json", type=PATH)
@click.option("--budget", required=True, metavar="BYTES", help="16GiB, 800MB, a number of bytes, or 60% of the peak.")
@output_option("Where to write the plan.")
@planning_options
@region_option("model")
@json_option
@force_option
def command(profile_path: Path, budget: str, output: Path | None, as_json: bool, force: bool, **planning: Any) -> None:
    """Choose keep, swap or recompute for every activation of profile P.json."""
    from pooch import session
    from pooch.ir import Profile

    refuse_overwriting(output, force)
    profile = Profile.load(profile_path)
    with progress_shown() as progress:
        plan = session.plan(profile, budget, progress=progress, **planning)
    if output is not None:
        plan.save(output)
    if as_json:
        from pooch.report.summaries import plan_record

        print_json(plan_record(plan) | {"output": str(output) if output else None})
        return
    from pooch.report.tables import choices_table, plan_table

    print_tables(plan_table(plan), choices_table(plan))
    if output is not None:
        click.echo(f"wrote {output}")
