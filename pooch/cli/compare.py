"""`pooch compare`: every policy under every budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    PATH,
    count_option,
    measure_options,
    options_by_policy,
    output_option,
    plot_option,
    ranks_option,
    results_options,
    shared_planning_options,
)
from .output import print_json, print_tables, print_written, progress_shown

if TYPE_CHECKING:
    from ..api.measure.comparison import ComparisonRow
    from ..ir import Profile
    from ..workloads.loading import WorkloadFactory


@click.command("compare")
@click.argument("profile_path", metavar="P.json", type=PATH)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    required=True,
    metavar="BYTES",
    help="As for plan; can be given several times.",
)
@click.option("--policy", "policies", multiple=True, help="Only these policies (default: all).")
@shared_planning_options(region="step")
@ranks_option
@output_option("--csv", "csv_path", help="Write all rows as CSV.")
@plot_option("Draw time against memory")
@click.option("--all", "draw_all", is_flag=True, help="For --plot: also policies that others beat under every budget.")
@measure_options("Also train under each plan: the workload of the profile.", "that of the profile")
@count_option("--steps", 3, "Steps to measure.")
@results_options
def command(
    profile_path: Path,
    budgets: tuple[str, ...],
    policies: tuple[str, ...],
    policy_options: tuple[str, ...],
    ranks: int,
    csv_path: Path | None,
    plot: Path | None,
    draw_all: bool,
    factory: WorkloadFactory | None,
    steps: int,
    as_json: bool,
    **planning: Any,
) -> None:
    """Plan profile P.json by every policy under each budget."""
    from ..api.measure.comparison import compare, measure_rows
    from ..api.options import PlanOptions
    from ..ir import Profile

    profile = Profile.load(profile_path).shared_by(ranks)
    parameters = options_by_policy(policy_options, policies)
    with progress_shown() as progress:
        rows = compare(
            profile,
            budgets,
            PlanOptions(**planning),
            policies=policies,
            policy_options=parameters,
            progress=progress,
        )
        if factory is not None:
            batch_size, device = factory.batch_size or profile.batch_size or None, factory.device or profile.device.kind
            factory = replace(factory, batch_size=batch_size, device=device)
            rows = measure_rows(rows, factory, steps=steps, progress=progress)
    _write(profile, rows, csv_path, plot, draw_all)
    _print(rows, as_json, csv_path, plot)


def _write(
    profile: Profile, rows: tuple[ComparisonRow, ...], csv_path: Path | None, plot: Path | None, draw_all: bool
) -> None:
    if csv_path is not None:
        from ..ir.files import replace_file
        from ..report.summaries import comparison_csv

        replace_file(csv_path, comparison_csv(rows).encode())
    if plot is not None:
        from ..report.curves import profile_title
        from ..report.figures import save_figure
        from ..report.pareto import draw_pareto

        save_figure(draw_pareto(rows, profile_title(profile), show_all=draw_all), plot)


def _print(rows: tuple[ComparisonRow, ...], as_json: bool, csv_path: Path | None, plot: Path | None) -> None:
    from ..report.summaries import comparison_record
    from ..report.tables import comparison_table, measured_table

    if as_json:
        print_json([comparison_record(row) for row in rows])
        return
    print_tables(comparison_table(rows))
    if any(row.measured is not None for row in rows):
        print_tables(measured_table(rows))
    print_written(csv_path, plot)
