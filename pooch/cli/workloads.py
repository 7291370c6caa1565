"""`pooch workloads`: the built-in workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..ground.errors import UsageError
from ..ground.wording import did_you_mean
from .options import json_option
from .output import print_json, print_tables, say

if TYPE_CHECKING:
    from ..workloads import BuiltIn


@click.command("workloads")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the built-in workloads, or the named sizes of one."""
    from ..workloads import built_in, built_in_workloads

    if name is None:
        entries = list(built_in_workloads().values())
    else:
        entry = built_in(name)
        if entry is None:
            raise UsageError(f"there is no built-in workload {name!r}: {did_you_mean(name, built_in_workloads())}")
        entries = [entry]
    if as_json:
        print_json([_record(entry) for entry in entries])
        return
    from ..report.tables import facts_table

    if name is not None:
        print_tables(facts_table(f"{entries[0].name}: {entries[0].summary}", _facts(entries[0])))
        return
    facts = {entry.name: entry.summary + (f" (needs {entry.package})" if entry.package else "") for entry in entries}
    print_tables(facts_table("built-in workloads", facts))
    say("\nNamed sizes: pooch workloads NAME, then NAME@SIZE, such as resnet50@small.")
    say("Your own: file.py:function, a function of batch_size and device that returns a pooch.Workload.")
    say("ONNX models: model.onnx (needs the onnx package).")


def _record(entry: BuiltIn) -> dict[str, Any]:
    return {
        "name": entry.name,
        "summary": entry.summary,
        "package": entry.package,
        "source": entry.source,
        "grows": [growth.setting for growth in entry.growths],
        "sizes": {preset.name: {"settings": dict(preset.settings), "note": preset.note} for preset in entry.presets},
    }


def _facts(entry: BuiltIn) -> dict[str, str]:
    facts = {"source": entry.source, "grows by": ", ".join(growth.setting for growth in entry.growths)}
    for preset in entry.presets:
        settings = ", ".join(f"{key}={value}" for key, value in preset.settings.items())
        facts[f"{entry.name}@{preset.name}"] = f"{settings}  ({preset.note})"
    return facts
