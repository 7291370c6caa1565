"""`pooch run`: train a workload under a saved plan, and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..ground.errors import PoochError
from .exporting import Export
from .options import PATH, export_option, results_options, training_options, verbose_option, workload_options
from .output import print_json, print_tables, progress_shown, say

if TYPE_CHECKING:
    from ..api.measure.training_report import TrainingReport
    from ..ir import Plan
    from ..workloads import WorkloadFactory


@click.command("run")
@workload_options
@click.option("--plan", "plan_path", type=PATH, metavar="PLAN.json", help="The plan (default: train without one).")
@training_options
@export_option
@verbose_option
@results_options
def command(
    factory: WorkloadFactory,
    plan_path: Path | None,
    export_path: Path | None,
    verbose: bool,
    as_json: bool,
    **training: Any,
) -> None:
    """Train WORKLOAD for a few steps under a plan, and report memory, time and whether the numbers are the same."""
    from ..api.measure.measuring import measure_training
    from ..ir import Plan
    from ..report.training import training_record

    export = Export(export_path, factory.name)
    plan = Plan.load(plan_path) if plan_path else None
    with progress_shown() as progress:
        report = measure_training(factory, plan, when_trained=export, progress=progress, **training)
    if as_json:
        print_json(training_record(report) | export.record())
    else:
        print_verdict(report, plan)
        print_training(report, export, verbose=verbose)
    refuse_broken_promise(report, export)


def print_verdict(report: TrainingReport, plan: Plan | None) -> None:
    """Print what a person wants to know, and whether the times can be trusted."""
    from ..api.measure.doubt import doubt_of_training
    from ..report.verdict import EVERYTHING_FITS, needs_no_plan, training_verdict

    if plan is not None and needs_no_plan(plan):
        say(EVERYTHING_FITS)
    say(training_verdict(report))
    doubt = doubt_of_training(report)
    if doubt is not None:
        say(doubt)


def print_training(report: TrainingReport, export: Export, *, verbose: bool) -> None:
    """Print the tables of a training, and the line of an export if there was one."""
    from ..report.training import training_tables

    print_tables(*training_tables(report, verbose=verbose))
    if export.report is not None:
        say(export.report.line())


def refuse_broken_promise(report: TrainingReport, export: Export) -> None:
    """Raise if the training or the export is not what it should be.

    Raises:
        PoochError: what is wrong.
    """
    from ..report.training import broken_promise

    broken = broken_promise(report)
    if broken is not None:
        raise PoochError(broken)
    if export.report is not None:
        export.report.refuse_different()
