"""`pooch doctor`: examine this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..ground.errors import PoochError
from ..ir.files import replace_file
from .checks import refuse_missing_device
from .options import device_option, output_option, results_options, spill_directory_option
from .output import print_json, print_tables, print_written, progress_shown, say


@click.command("doctor")
@device_option("Device to examine (default: the GPU if there is one).")
@output_option(
    "-o",
    "--output",
    default="pooch-doctor.json",
    show_default=True,
    help="Where to write all figures, to be attached to a report: without names of users, hosts or directories.",
)
@spill_directory_option
@results_options
def command(device: str | None, output: Path, as_json: bool) -> None:
    """Examine this machine in at most 3 minutes: whether Pooch keeps its promises here, and what is in its way.

    Looks at software, memory, clocks, random numbers, copies and operators, and trains ten small models with
    Pooch and without. Exit code 1 if something is wrong.
    """
    refuse_missing_device(device)
    import torch

    from ..api.doctor import examine
    from ..report.doctor import doctor_record, doctor_table, doctor_verdict
    from ..torchtools.accelerators import all_accelerators, current_device

    here = all_accelerators()
    kind = device or (here[0].type if here else "cpu")
    chosen = torch.device(kind) if ":" in kind else current_device(kind)
    with progress_shown() as progress:
        examination = examine(chosen, progress=progress)
    record = doctor_record(examination)
    replace_file(output, (json.dumps(record, indent=2, allow_nan=False) + "\n").encode())
    if as_json:
        print_json(record)
    else:
        say(doctor_verdict(examination))
        print_tables(doctor_table(examination))
        print_written(output)
    if examination.faults:
        names = ", ".join(each.check for each in examination.causes)
        raise PoochError(f"not right on this machine: {names}: what to do stands beside each finding")
