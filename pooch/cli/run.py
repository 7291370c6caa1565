"""`pooch run`: train a workload under a saved plan, and measure it."""

from __future__ import annotations

from pathlib import Path

import click

from pooch.cli.options import PATH, json_option, training_options, workload_options
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("run")
@workload_options
@click.option("--plan", "plan_path", type=PATH, metavar="PLAN.json", help="The plan (default: train plainly).")
@training_options
@json_option
def command(
    workload: str,
    batch_size: int | None,
    device: str | None,
    settings: tuple[str, ...],
    plan_path: Path | None,
    steps: int,
    check: bool,
    hard_limit: bool,
    as_json: bool,
) -> None:
    """Train WORKLOAD for a few steps under a plan; tell peak, time and whether the numbers are the same."""
    from pooch import session
    from pooch.ir import Plan
    from pooch.report.training import training_record, training_table
    from pooch.workloads import parse_settings, workload_factory

    plan = Plan.load(plan_path) if plan_path else None
    factory = workload_factory(workload, batch_size=batch_size, device=device, settings=parse_settings(settings))
    with progress_shown() as progress:
        report = session.measure_training(
            factory, plan, steps=steps, check=check, hard_limit=hard_limit, progress=progress
        )
    if as_json:
        print_json(training_record(report))
    else:
        print_tables(training_table(report))
