"""`pooch reproduce`: a published experiment, with the paper's figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..cli.options import PATH, json_option
from ..cli.output import print_json, print_tables, progress_shown, say


@click.command("reproduce")
@click.argument("name", metavar="pooch|tflms|unet3d|meng|char-rnn|policies")
@click.option("--rows", multiple=True, metavar="PATTERN", help="Answer only these rows, such as 'resnet50-*'.")
@click.option("--method", "methods", multiple=True, metavar="PATTERN", help="Answer only by these, such as 'pooch_*'.")
@click.option("--quick", is_flag=True, help="Answer only the rows that represent the others.")
@click.option(
    "--part", type=click.Choice(["all", "simulated", "measured"]), default="all", show_default=True,
    help="Rows for the paper's hardware (simulated), for this machine (measured), or both.",
)  # fmt: skip
@click.option(
    "-o", "--output", "folder", type=PATH, metavar="FOLDER",
    help="Record answers in FOLDER/NAME.json, and skip rows that are recorded there.",
)  # fmt: skip
@click.option("--again", is_flag=True, help="Answer recorded rows again.")
@click.option("--show", "only_recorded", is_flag=True, help="Print the recorded answers and run nothing.")
@click.option(
    "--time-limit", "time_limit_s", type=float, default=60.0, show_default=True, metavar="SECONDS",
    help="Limit for each plan.",
)  # fmt: skip
@json_option
def command(name: str, folder: Path | None, only_recorded: bool, as_json: bool, **running: Any) -> None:
    """Run the published experiment NAME: compare the paper's figure with each method and with ours, modelled on the
    paper's hardware, and measured on this machine at a reduced size.
    """
    from ..ground.errors import UsageError
    from .experiments import find_experiment
    from .running import reproduce
    from .tables import reproduction_record, reproduction_tables

    experiment = find_experiment(name)
    if only_recorded and folder is None:
        raise UsageError("--show prints the answers recorded in a folder: add -o FOLDER")
    with progress_shown() as progress:
        result = reproduce(experiment, folder=folder, only_recorded=only_recorded, progress=progress, **running)
    if as_json:
        print_json(reproduction_record(result))
        return
    say(f"{experiment.title}\n\n{experiment.about}\n")
    print_tables(*(table.rich() for table in reproduction_tables(result)))
