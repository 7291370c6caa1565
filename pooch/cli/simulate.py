"""`pooch simulate`: what a step under a plan would take, and its trace."""

from __future__ import annotations

from pathlib import Path

import click

from pooch.cli.options import PATH, force_option, json_option, ranks_option, refuse_overwriting
from pooch.cli.output import print_json, print_tables


@click.command("simulate")
@click.argument("profile_path", metavar="P.json", type=PATH)
@click.argument("plan_path", metavar="PLAN.json", type=PATH)
@click.option("--trace", type=PATH, metavar="FILE", help="Write a Chrome trace, for Perfetto or chrome://tracing.")
@ranks_option
@json_option
@force_option
def command(profile_path: Path, plan_path: Path, trace: Path | None, ranks: int, as_json: bool, force: bool) -> None:
    """Predict one step of profile P.json under PLAN.json."""
    from pooch.api.simulation import simulate
    from pooch.ir import Plan, Profile
    from pooch.ir.files import replace_file

    refuse_overwriting(trace, force)
    profile = Profile.load(profile_path).shared_by(ranks)
    timeline = simulate(profile, Plan.load(plan_path))
    if trace is not None:
        from pooch.report.trace import trace_text

        replace_file(trace, trace_text(profile, timeline).encode())
    if as_json:
        from pooch.report.summaries import timeline_record

        print_json(timeline_record(timeline) | {"trace": str(trace) if trace else None})
        return
    from pooch.report.tables import timeline_table

    print_tables(timeline_table(timeline))
    if trace is not None:
        click.echo(f"wrote {trace}: open it in https://ui.perfetto.dev or chrome://tracing")
