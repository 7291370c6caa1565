"""`pooch optimize`: profile, plan, run, measure and repair, in one go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pooch.cli.exporting import Export
from pooch.cli.options import (
    PATH,
    budget_option,
    export_option,
    force_option,
    json_option,
    memory_limit_option,
    mode_option,
    options_of_policy,
    planning_options,
    ranks_option,
    refuse_existing,
    region_option,
    training_options,
    workload_options,
)
from pooch.cli.output import print_json, print_tables, progress_shown
from pooch.errors import FileFormatError, UsageError

if TYPE_CHECKING:
    from pooch.measure.measuring import Optimized

_PROFILE, _PLAN = "profile.json", "plan.json"


@click.command("optimize")
@workload_options
@budget_option
@mode_option
@memory_limit_option
@planning_options
@ranks_option
@region_option("step")
@training_options
@export_option
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
    policy_options: tuple[str, ...],
    export_path: Path | None,
    as_json: bool,
    force: bool,
    **optimizing: Any,
) -> None:
    """Profile WORKLOAD, plan it under --budget, train it under the plan, and measure that."""
    from pooch.cli.run import print_export, print_training, refuse_broken_promise
    from pooch.measure.measuring import optimize
    from pooch.report.summaries import plan_record, profile_record
    from pooch.report.tables import choices_table, plan_table, profile_table
    from pooch.report.training import training_record
    from pooch.workloads import parse_settings, workload_factory

    _check_folder(folder, force)
    export = Export(export_path, workload, force=force)
    factory = workload_factory(workload, batch_size=batch_size, device=device, settings=parse_settings(settings))
    options = options_of_policy(policy_options, optimizing["policy"])
    with progress_shown() as progress:
        result = optimize(factory, budget, policy_options=options, when_trained=export, progress=progress, **optimizing)
    if folder is not None:
        _save(result, folder)
    if as_json:
        parts = {"profile": profile_record(result.profile), "plan": plan_record(result.plan)}
        print_json(parts | {"training": training_record(result.training)} | export.record())
    else:
        print_tables(profile_table(result.profile), plan_table(result.plan), choices_table(result.plan))
        print_training(result.training)
        print_export(export)
    refuse_broken_promise(result.training)
    export.refuse_different()


def _check_folder(folder: Path | None, force: bool) -> None:
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: --output takes one, for {_PROFILE} and {_PLAN}")
    for name in (_PROFILE, _PLAN):
        refuse_existing(folder / name, force)


def _save(result: Optimized, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"cannot make the folder {folder}: {error.strerror}: give another one") from error
    result.profile.save(folder / _PROFILE)
    result.plan.save(folder / _PLAN)
