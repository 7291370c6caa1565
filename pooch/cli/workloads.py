"""`pooch workloads`: what can be profiled without writing a file."""

from __future__ import annotations

import click

from pooch.cli.options import json_option
from pooch.cli.output import print_json, print_tables


@click.command("workloads")
@json_option
def command(as_json: bool) -> None:
    """List the built-in workloads."""
    from pooch.workloads import BUILT_IN

    entries = list(BUILT_IN.values())
    if as_json:
        print_json([{"name": entry.name, "summary": entry.summary, "package": entry.package} for entry in entries])
        return
    from pooch.report.tables import facts_table

    facts = {entry.name: entry.summary + (f" (needs {entry.package})" if entry.package else "") for entry in entries}
    print_tables(facts_table("built-in workloads", facts))
    click.echo("\nYour own: file.py:function, a function of batch_size and device that returns pooch.Workload.")
