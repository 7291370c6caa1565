"""`pooch compare`: every policy under every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pooch.cli.options import PATH, json_option, region_option, time_limit_option
from pooch.cli.output import print_json, print_tables, progress_shown


@click.command("compare")
@click.argument("profile_path", metavar="P.json", type=PATH)
@click.option("--budget", "budgets", multiple=True, required=True, metavar="BYTES", help="May be given several times.")
@click.option("--policy", "policies", multiple=True, help="Only these (default: all).")
@time_limit_option
@region_option("model")
@json_option
def command(profile_path: Path, as_json: bool, **comparing: Any) -> None:
    """Plan profile P.json by every policy, under each budget."""
    from pooch import session
    from pooch.ir import Profile

    profile = Profile.load(profile_path)
    with progress_shown() as progress:
        rows = session.compare(profile, progress=progress, **comparing)
    if as_json:
        from pooch.report.summaries import comparison_records

        print_json(comparison_records(rows))
        return
    from pooch.report.tables import comparison_table

    print_tables(comparison_table(rows))
