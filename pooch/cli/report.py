"""`pooch report`: a plan as a page to look at and to send."""

from __future__ import annotations

from pathlib import Path

import click

from ..ground.units import format_bytes, plural
from .options import (
    PATH,
    host_budget_option,
    output_option,
    profile_option,
    ranks_option,
    results_options,
    time_limit_option,
)
from .output import command_line, print_json, progress_shown, say


@click.command("report")
@click.argument("plan_path", metavar="PLAN.json", type=PATH)
@profile_option(required=True)
@output_option(help="The HTML file to write.", required=True)
@click.option(
    "--budgets",
    default="9",
    show_default=True,
    metavar="N|LIST",
    help="Other budgets to choose from on the page: how many, evenly from the smallest feasible one to 100%, or which, "
    "such as 60%,800MB. Each is planned like PLAN.json.",
)
@time_limit_option
@host_budget_option
@ranks_option
@results_options
def command(
    plan_path: Path,
    profile_path: Path,
    output: Path,
    budgets: str,
    time_limit_s: float,
    host_budget: str | None,
    ranks: int,
    as_json: bool,
) -> None:
    """Write PLAN.json as one HTML page: memory, streams and decisions, and what other budgets would cost.

    The page needs no network. --time-limit is for each budget.
    """
    from ..ir import Plan, Profile
    from ..report.page.budgets import parse_budgets
    from ..report.page.writing import write_report

    asked = parse_budgets(budgets)
    profile = Profile.load(profile_path).shared_by(ranks)
    with progress_shown() as progress:
        written = write_report(
            profile,
            Plan.load(plan_path),
            output,
            budgets=asked,
            host_budget=host_budget,
            time_limit_s=time_limit_s,
            progress=progress,
            command=command_line(),
        )
    size_bytes = output.stat().st_size
    if as_json:
        from ..report.summaries import plan_record

        plans = [plan_record(plan) for plan in written.plans]
        print_json({"output": str(output), "size_bytes": size_bytes, "plans": plans, "notes": list(written.notes)})
        return
    for note in written.notes:
        say(note)
    say(f"wrote {output} ({format_bytes(size_bytes)}, {plural(len(written.plans), 'budget')}): open it in a browser")
