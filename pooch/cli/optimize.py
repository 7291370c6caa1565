"""`pooch optimize`: profile, plan, run and measure in one command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..ground.errors import FileFormatError, UsageError
from .exporting import Export
from .options import (
    PATH,
    budget_option,
    export_option,
    memory_limit_option,
    mode_option,
    planning_options,
    ranks_option,
    refuse_existing,
    results_options,
    training_options,
    verbose_option,
    workload_options,
)
from .output import print_json, print_tables, progress_shown

if TYPE_CHECKING:
    from ..api.measure.measuring import Optimized
    from ..api.options import PlanOptions
    from ..workloads import WorkloadFactory

_PROFILE, _PLAN = "profile.json", "plan.json"


def _check_folder(context: click.Context, parameter: click.Parameter, folder: Path | None) -> Path | None:
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: --output takes one, for {_PROFILE} and {_PLAN}")
        for name in (_PROFILE, _PLAN):
            refuse_existing(context, folder / name)
    return folder


@click.command("optimize")
@workload_options
@budget_option
@mode_option
@memory_limit_option
@planning_options(region="step")
@ranks_option
@training_options
@export_option
@click.option(
    "-o",
    "--output",
    "folder",
    type=PATH,
    metavar="FOLDER",
    callback=_check_folder,
    help="Save profile.json and plan.json there.",
)
@verbose_option
@results_options
def command(
    factory: WorkloadFactory,
    budget: str,
    options: PlanOptions,
    folder: Path | None,
    export_path: Path | None,
    verbose: bool,
    as_json: bool,
    **measuring: Any,
) -> None:
    """Profile WORKLOAD, plan it under --budget, train it under the plan, and measure the training."""
    from ..api.measure.measuring import optimize
    from ..report.summaries import plan_record, profile_record
    from ..report.tables import choices_table, plan_table, profile_table
    from ..report.training import training_record
    from .run import print_training, print_verdict, refuse_broken_promise

    export = Export(export_path, factory.name)
    with progress_shown(planning=options.time_limit_s) as progress:
        result = optimize(factory, budget, options, when_trained=export, progress=progress, **measuring)
    if folder is not None:
        _save(result, folder)
    if as_json:
        parts = {"profile": profile_record(result.profile), "plan": plan_record(result.plan)}
        print_json(parts | {"training": training_record(result.training)} | export.record())
    else:
        print_verdict(result.training, result.plan)
        profile = profile_table(result.profile, verbose=verbose)
        print_tables(profile, plan_table(result.plan), choices_table(result.plan))
        print_training(result.training, export, verbose=verbose)
    refuse_broken_promise(result.training, export)


def _save(result: Optimized, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"cannot make the folder {folder}: {error.strerror}: give another one") from error
    result.profile.save(folder / _PROFILE)
    result.plan.save(folder / _PLAN)
