"""`pooch profile`: measure one training step of a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    count_option,
    device_model_option,
    memory_limit_option,
    mode_option,
    modelled_ranks_options,
    output_option,
    results_options,
    verbose_option,
    workload_options,
)
from .output import print_json, print_tables, print_written, progress_shown

if TYPE_CHECKING:
    from ..workloads import WorkloadFactory


@click.command("profile")
@workload_options
@output_option(help="Where to write the profile.", required=True)
@mode_option
@memory_limit_option
@device_model_option
@modelled_ranks_options
@count_option("--warmup", 1, "Untimed steps that come first.", type=click.IntRange(min=0))
@count_option("--repeats", 1, "Timed steps.")
@click.option("--accumulate", is_flag=True, help="Count gradients as live all the time, as when they accumulate.")
@verbose_option
@results_options
def command(
    factory: WorkloadFactory, output: Path, device_model: str | None, verbose: bool, as_json: bool, **profiling: Any
) -> None:
    """Measure one training step of WORKLOAD, or model it (--mode fake, --device-model)."""
    from ..api.profiling import profile_workload
    from ..devices import find_device
    from ..report.summaries import profile_record
    from ..report.tables import layers_table, profile_table

    modelled = None if device_model is None else find_device(device_model)
    with progress_shown() as progress:
        progress(f"building {factory.name}")
        profile = profile_workload(factory, device_model=modelled, progress=progress, **profiling)
    profile.save(output)
    if as_json:
        print_json(profile_record(profile) | {"output": str(output)})
    else:
        print_tables(profile_table(profile, verbose=verbose), layers_table(profile))
        print_written(output)
