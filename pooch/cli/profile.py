"""`pooch profile`: measure one training step of a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from pooch.cli.options import (
    device_model_option,
    force_option,
    json_option,
    memory_limit_option,
    mode_option,
    output_option,
    refuse_overwriting,
    workload_options,
)
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("profile")
@workload_options
@output_option("Where to write the profile.", required=True)
@mode_option
@memory_limit_option
@device_model_option
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Plain steps before.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Timed steps.")
@click.option("--accumulate", is_flag=True, help="Gradients live through the step.")
@json_option
@force_option
def command(
    workload: str,
    batch_size: int | None,
    device: str | None,
    settings: tuple[str, ...],
    output: Path,
    mode: Literal["auto", "run", "offload", "fake"],
    memory_limit: str | None,
    device_model: str | None,
    warmup: int,
    repeats: int,
    accumulate: bool,
    as_json: bool,
    force: bool,
) -> None:
    """Measure one training step of WORKLOAD, or model it (--mode fake, --device-model)."""
    from pooch.api.profiling import profile_workload
    from pooch.devices import find_device
    from pooch.workloads import parse_settings, workload_factory

    refuse_overwriting(output, force)
    modelled = None if device_model is None else find_device(device_model)
    with progress_shown() as progress:
        progress(f"building {workload}")
        factory = workload_factory(workload, batch_size=batch_size, device=device, settings=parse_settings(settings))
        profile = profile_workload(
            factory,
            accumulate=accumulate,
            warmup=warmup,
            repeats=repeats,
            mode=mode,
            memory_limit=memory_limit,
            device_model=modelled,
            progress=progress,
        )
    profile.save(output)
    if as_json:
        from pooch.report.summaries import profile_record

        print_json(profile_record(profile) | {"output": str(output)})
        return
    from pooch.report.tables import layers_table, profile_table

    print_tables(profile_table(profile), layers_table(profile))
    click.echo(f"wrote {output}")
