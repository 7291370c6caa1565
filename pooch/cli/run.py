"""`pooch run`: train a workload under a saved plan, and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pooch.cli.exporting import Export
from pooch.cli.options import PATH, export_option, force_option, json_option, training_options, workload_options
from pooch.cli.output import print_json, print_tables, progress_shown
from pooch.errors import PoochError

if TYPE_CHECKING:
    from pooch.measure.training_report import TrainingReport


@click.command("run")
@workload_options
@click.option("--plan", "plan_path", type=PATH, metavar="PLAN.json", help="The plan (default: train plainly).")
@training_options
@export_option
@json_option
@force_option
def command(
    workload: str,
    batch_size: int | None,
    device: str | None,
    settings: tuple[str, ...],
    plan_path: Path | None,
    steps: int,
    check: bool,
    hard_limit: bool,
    export_path: Path | None,
    as_json: bool,
    force: bool,
) -> None:
    """Train WORKLOAD for a few steps under a plan; tell peak, time and whether the numbers are the same."""
    from pooch.ir import Plan
    from pooch.measure.measuring import measure_training
    from pooch.report.training import training_record
    from pooch.workloads import parse_settings, workload_factory

    export = Export(export_path, workload, force=force)
    plan = Plan.load(plan_path) if plan_path else None
    factory = workload_factory(workload, batch_size=batch_size, device=device, settings=parse_settings(settings))
    with progress_shown() as progress:
        report = measure_training(
            factory, plan, steps=steps, check=check, hard_limit=hard_limit, when_trained=export, progress=progress
        )
    if as_json:
        print_json(training_record(report) | export.record())
    else:
        print_training(report)
        print_export(export)
    refuse_broken_promise(report)
    export.refuse_different()


def print_training(report: TrainingReport) -> None:
    """The tables of a training."""
    from pooch.report.training import training_tables

    print_tables(*training_tables(report))


def print_export(export: Export) -> None:
    """The line of an export, if there was one."""
    if (line := export.line()) is not None:
        click.echo(line)


def refuse_broken_promise(report: TrainingReport) -> None:
    """A promise that was measured and not kept is an error, also for programs.

    Raises:
        PoochError: which one.
    """
    from pooch.report.training import broken_promise

    broken = broken_promise(report)
    if broken is not None:
        raise PoochError(broken)
