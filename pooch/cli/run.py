"""`pooch run`: train a workload under a saved plan, and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pooch.cli.options import PATH, json_option, training_options, workload_options
from pooch.cli.output import print_json, print_tables, progress_shown
from pooch.errors import PoochError

if TYPE_CHECKING:
    from pooch.session import TrainingReport


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
    from pooch.report.training import training_record
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
        print_training(report)
    refuse_broken_promise(report)


def print_training(report: TrainingReport) -> None:
    """The tables of a training."""
    from pooch.report.training import training_tables

    print_tables(*training_tables(report))


def refuse_broken_promise(report: TrainingReport) -> None:
    """A promise that was measured and not kept is an error, also for programs.

    Raises:
        PoochError: which one.
    """
    from pooch.report.training import broken_promise

    broken = broken_promise(report)
    if broken is not None:
        raise PoochError(broken)
