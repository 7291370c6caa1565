"""`pooch simulate`: predict a step under a plan."""

from __future__ import annotations

from pathlib import Path

import click

from .options import PATH, output_option, ranks_option, results_options
from .output import print_json, print_tables, say


@click.command("simulate")
@click.argument("profile_path", metavar="P.json", type=PATH)
@click.argument("plan_path", metavar="PLAN.json", type=PATH)
@output_option("--trace", help="Write a Chrome trace, for Perfetto or chrome://tracing.")
@ranks_option
@results_options
def command(profile_path: Path, plan_path: Path, trace: Path | None, ranks: int, as_json: bool) -> None:
    """Predict one step of profile P.json under PLAN.json."""
    from ..api.simulation import simulate
    from ..ir import Plan, Profile
    from ..ir.files import replace_file
    from ..report.summaries import timeline_record
    from ..report.tables import timeline_table
    from ..report.trace import trace_text

    profile = Profile.load(profile_path).shared_by(ranks)
    timeline = simulate(profile, Plan.load(plan_path))
    if trace is not None:
        replace_file(trace, trace_text(profile, timeline).encode())
    if as_json:
        print_json(timeline_record(timeline) | {"trace": str(trace) if trace else None})
        return
    print_tables(timeline_table(timeline))
    if trace is not None:
        say(f"wrote {trace}: open it in https://ui.perfetto.dev or chrome://tracing")
