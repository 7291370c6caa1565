"""`pooch devices`: the devices of this machine, those that can be modelled, and adding one to the other."""

from __future__ import annotations

from pathlib import Path

import click

from ..ground.errors import UsageError
from .options import PATH, device_option, json_option, spill_directory_option
from .output import print_json, print_tables, progress_shown, say


@click.command("devices")
@click.option("--all", "show_all", is_flag=True, help="List the names that --device-model takes.")
@click.option("--measure", is_flag=True, help="Measure a device of this machine and add it to a catalogue.")
@device_option("Device to measure (default: the GPU if there is one).")
@click.option("--name", default="here", show_default=True, help="Name of the measured device.")
@click.option("-o", "--output", type=PATH, metavar="FILE", help="Catalogue to add it to (default: your own).")
@spill_directory_option
@json_option
def command(show_all: bool, measure: bool, device: str | None, name: str, output: Path | None, as_json: bool) -> None:
    """List the devices of this machine with their measured transfer rates, or all that can be modelled (--all)."""
    if show_all and measure:
        raise UsageError("--all lists and --measure adds: give one of them")
    if not measure and (device or output):
        raise UsageError("--device and --output are for --measure: add it")
    if measure:
        _measure(device, name, output, as_json)
    elif show_all:
        _list_catalogue(as_json)
    else:
        _list_here(as_json)


def _list_here(as_json: bool) -> None:
    from ..api.device_links import measure_devices
    from ..report.summaries import device_record
    from ..report.tables import devices_tables

    with progress_shown() as progress:
        found = measure_devices(progress=progress)
    if as_json:
        print_json([device_record(device, link) for device, link in found])
        return
    print_tables(*devices_tables(found))


def _list_catalogue(as_json: bool) -> None:
    from ..devices import known_devices
    from ..report.devices import catalogue_tables
    from ..report.summaries import device_model_record

    models = known_devices().values()
    if as_json:
        print_json([device_model_record(model) for model in models])
        return
    print_tables(*catalogue_tables(models))


def _measure(device: str | None, name: str, output: Path | None, as_json: bool) -> None:
    import torch

    from ..api.measure.device_measuring import measure_device_model
    from ..devices import user_catalogue, write_device
    from ..report.devices import catalogue_tables
    from ..report.summaries import device_model_record
    from ..torchtools.accelerators import all_accelerators

    here = [torch.device("cpu"), *all_accelerators()]
    names = {name for each in here for name in (each.type, str(each))}
    kind = device or here[-1].type
    if kind not in names:
        raise UsageError(f"this machine has no device {kind!r}: give --device cpu, or leave it out")
    path = output or user_catalogue()
    with progress_shown() as progress:
        model = measure_device_model(torch.device(kind), name, progress)
    write_device(model, path)
    if as_json:
        print_json(device_model_record(model) | {"output": str(path)})
        return
    print_tables(*catalogue_tables([model]))
    say(f"wrote {model.name} to {path}; model steps for it with --device-model {path if output else model.name}")
