"""`pooch max-batch`: the largest batch, volume or sequence that fits under a plan, and its throughput."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pooch.cli.options import (
    PATH,
    device_model_option,
    force_option,
    json_option,
    options_of_policy,
    planning_options,
    refuse_overwriting,
    region_option,
    workload_options,
)
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("max-batch")
@workload_options
@click.option("--budget", required=True, metavar="BYTES", help="16GiB, 800MB, or a number of bytes.")
@click.option("--grow", default="batch_size", show_default=True, metavar="SETTING", help="What grows.")
@click.option("--start", type=click.IntRange(min=1), metavar="N", help="A size to begin with.")
@click.option("--most", type=click.IntRange(min=1), metavar="N", help="Look no further than this size.")
@click.option("--points", type=click.IntRange(min=2), default=5, show_default=True, help="Sizes of the curve.")
@click.option(
    "--mode", type=click.Choice(["fake", "auto", "run", "offload"]), default="fake", show_default=True,
    help="How each size is profiled: fake takes no memory.",
)  # fmt: skip
@device_model_option
@planning_options
@region_option("step")
@click.option("--measure", is_flag=True, help="Really train at the size found, and plainly at the in-core one.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to measure.")
@click.option("--plot", type=PATH, metavar="FILE", help="Draw throughput against size: a .png, .pdf or .svg file.")
@json_option
@force_option
def command(
    workload: str,
    settings: tuple[str, ...],
    device_model: str | None,
    policy: str,
    policy_options: tuple[str, ...],
    measure: bool,
    steps: int,
    plot: Path | None,
    as_json: bool,
    force: bool,
    **searching: Any,
) -> None:
    """Find the largest batch of WORKLOAD that fits into --budget under a plan, and the throughput up to there."""
    from pooch.batch_search.max_batch import max_batch
    from pooch.devices import find_device
    from pooch.workloads import parse_settings

    _check_plot(plot, force)
    with progress_shown() as progress:
        result = max_batch(
            workload,
            settings=parse_settings(settings),
            device_model=find_device(device_model) if device_model else None,
            policy=policy,
            policy_options=options_of_policy(policy_options, policy),
            measure_steps=steps if measure else 0,
            progress=progress,
            **searching,
        )
    if plot is not None:
        from pooch.report.figures import save_figure
        from pooch.report.growing import draw_max_batch

        save_figure(draw_max_batch(result), plot)
    from pooch.report.growing import max_batch_record, max_batch_tables

    if as_json:
        print_json(max_batch_record(result))
        return
    print_tables(*max_batch_tables(result))
    if plot is not None:
        click.echo(f"wrote {plot}")


def _check_plot(plot: Path | None, force: bool) -> None:
    if plot is not None:
        from pooch.report.figures import check_figure_path

        check_figure_path(plot)
        refuse_overwriting(plot, force)
