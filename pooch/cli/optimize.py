"""`pooch optimize`: profile, plan, run, measure and repair, in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pooch.cli.options import (
    PATH,
    force_option,
    json_option,
    mode_option,
    planning_options,
    refuse_overwriting,
    region_option,
    training_options,
    workload_options,
)
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("optimize")
@workload_options
@click.option("--budget", required=True, metavar="BYTES", help="16GiB, 800MB, a number of bytes, or 60% of the peak.")
@mode_option
@planning_options
@region_option("step")
@training_options
@click.option("-o", "--output", "folder", type=PATH, metavar="FOLDER", help="Keep profile.json and plan.json there.")
@json_option
@force_option
def command(
    workload: str,
    batch_size: int | None,
    device: str | None,
    settings: tuple[str, ...],
    budget: str,
    folder: Path | None,
    as_json: bool,
    force: bool,
    **optimizing: Any,
) -> None:
    """Profile WORKLOAD, plan it under --budget, train it under the plan, and measure that."""
    from pooch import session
    from pooch.report.summaries import plan_record, profile_record
    from pooch.report.tables import choices_table, plan_table, profile_table
    from pooch.report.training import training_record, training_table
    from pooch.workloads import parse_settings, workload_factory

    paths = {name: folder / f"{name}.json" for name in ("profile", "plan")} if folder else {}
    for path in paths.values():
        refuse_overwriting(path, force)
    factory = workload_factory(workload, batch_size=batch_size, device=device, settings=parse_settings(settings))
    with progress_shown() as progress:
        result = session.optimize(factory, budget, progress=progress, **optimizing)
    if paths:
        result.profile.save(paths["profile"])
        result.plan.save(paths["plan"])
    if as_json:
        parts = {"profile": profile_record(result.profile), "plan": plan_record(result.plan)}
        print_json(parts | {"training": training_record(result.training)})
        return
    print_tables(profile_table(result.profile), plan_table(result.plan), choices_table(result.plan))
    print_tables(training_table(result.training))
