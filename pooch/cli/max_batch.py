"""`pooch max-batch`: the largest batch, volume or sequence that fits under a plan, and its throughput."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    choice_option,
    count_option,
    device_model_option,
    planning_options,
    plot_option,
    results_options,
    workload_options,
)
from .output import print_json, print_tables, print_written, progress_shown, say

if TYPE_CHECKING:
    from ..api.options import PlanOptions
    from ..workloads import WorkloadFactory


@click.command("max-batch")
@workload_options
@click.option("--budget", required=True, metavar="BYTES", help="16GiB, 800MB, or a number of bytes.")
@click.option("--grow", default="batch_size", show_default=True, metavar="SETTING", help="Setting that grows.")
@count_option("--start", None, "A size to begin with.")
@count_option("--most", None, "Try no larger size than this.")
@count_option("--points", 5, "Number of sizes on the curve.", type=click.IntRange(min=2))
@choice_option("--mode", ["fake", "auto", "run", "offload"], "fake", "How to profile each size; fake takes no memory.")
@device_model_option
@planning_options(region="step")
@click.option("--measure", is_flag=True, help="Train at the largest size, and at the largest that fits without Pooch.")
@count_option("--steps", 3, "Steps to measure.")
@count_option("--repeats", 1, "Timed steps of a size that is run.")
@plot_option("Draw throughput against size")
@results_options
def command(
    factory: WorkloadFactory,
    device_model: str | None,
    options: PlanOptions,
    measure: bool,
    steps: int,
    plot: Path | None,
    as_json: bool,
    **searching: Any,
) -> None:
    """Find the largest batch of WORKLOAD that fits into --budget under a plan, and the throughput up to it."""
    from ..api.batch_search.max_batch import max_batch
    from ..devices import find_device
    from ..report.growing import (
        doubt_of_max_batch,
        draw_max_batch,
        max_batch_record,
        max_batch_tables,
        max_batch_verdict,
    )

    with progress_shown() as progress:
        result = max_batch(
            factory.name,
            batch_size=factory.batch_size,
            device=factory.device,
            settings=factory.settings,
            device_model=find_device(device_model) if device_model else None,
            measure_steps=steps if measure else 0,
            progress=progress,
            **searching,
            **asdict(options),
        )
    if plot is not None:
        from ..report.figures import save_figure

        save_figure(draw_max_batch(result), plot)
    if as_json:
        print_json(max_batch_record(result))
    else:
        say(max_batch_verdict(result))
        doubt = doubt_of_max_batch(result)
        if doubt is not None:
            say(doubt)
        print_tables(*max_batch_tables(result))
        print_written(plot)
