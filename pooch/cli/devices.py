"""`pooch devices`: what is here, and how fast bytes move to the swap tier and back."""

from __future__ import annotations

import click

from pooch.cli.options import json_option
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("devices")
@json_option
def command(as_json: bool) -> None:
    """List the devices with their measured transfer rates."""
    from pooch import session
    from pooch.report.summaries import device_record
    from pooch.report.tables import devices_tables

    with progress_shown() as progress:
        found = session.measure_devices(progress=progress)
    if as_json:
        print_json([device_record(device, link) for device, link in found])
        return
    print_tables(*devices_tables(found))
