"""`pooch pack`: offsets in one arena for blocks with known lifetimes."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..packing import POLICIES, pack, verify
from ..packing.files import load_blocks, save_offsets
from ..units import format_bytes
from .options import PATH, force_option, json_option, output_option, plot_option
from .output import print_json, print_written


@click.command("pack")
@click.argument("path", metavar="FILE.csv", type=PATH)
@click.option("--policy", type=click.Choice(list(POLICIES)), default="ours", show_default=True, help="How to pack.")
@click.option(
    "--time-limit",
    "time_limit_s",
    type=click.FloatRange(min=0, min_open=True),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="CPU time of the search of `ours`, which ends earlier at the bound.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the search.")
@output_option("-o", "--output", metavar="OFFSETS.csv", help="Write the blocks with their offsets.")
@plot_option("Draw the arena")
@json_option
@force_option
def command(
    path: Path, policy: str, time_limit_s: float, seed: int, output: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Place blocks in one arena, as low as they get.

    The file has the columns id, lower, upper, size and, if wanted, alignment. A block lives from lower until just
    before upper; blocks that live at the same time do not overlap.
    """
    blocks = load_blocks(path)
    started_s = time.process_time()
    layout = pack(blocks, policy=policy, time_limit_s=time_limit_s, seed=seed)
    seconds = time.process_time() - started_s
    verify(blocks, layout)
    if output is not None:
        save_offsets(output, blocks, layout)
    if plot is not None:
        from ..report.arena import draw_layout
        from ..report.figures import save_figure

        save_figure(draw_layout(blocks, layout), plot)
    if policy == "ours" and not layout.is_native:
        click.echo("  no C++ compiler: the search ran in Python and got less far; install g++", err=True)
    if as_json:
        record = {"policy": policy, "blocks": len(blocks), "arena_bytes": layout.arena_bytes}
        record |= {"bound_bytes": layout.bound_bytes, "ratio": layout.ratio, "seconds": seconds, "verified": True}
        print_json(record)
        return
    click.echo(
        f"{len(blocks)} blocks by {policy}: arena {format_bytes(layout.arena_bytes)} ({layout.arena_bytes} bytes), "
        f"bound {format_bytes(layout.bound_bytes)} ({layout.bound_bytes} bytes), ratio {layout.ratio:.4f}, "
        f"{seconds:.2f} CPU s, verified"
    )
    print_written(output, plot)
