"""`pooch show`: tables and a picture of a saved profile or plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..ground.errors import UsageError
from ..ir import Plan, Profile
from ..ir.files import load_document
from .options import PATH, count_option, plot_option, profile_option, results_options, verbose_option
from .output import print_json, print_tables, print_written

if TYPE_CHECKING:
    from rich.console import RenderableType


@click.command("show")
@click.argument("path", metavar="P.json|PLAN.json", type=PATH)
@profile_option()
@plot_option("Draw it")
@count_option("--depth", 2, "Module names per layer.")
@click.option("--all", "show_all", is_flag=True, help="Every activation of a plan, not only the largest.")
@click.option("--reasons", is_flag=True, help="Reasons in words instead of numbers.")
@verbose_option
@results_options
def command(
    path: Path,
    profile_path: Path | None,
    plot: Path | None,
    depth: int,
    show_all: bool,
    reasons: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Show a profile or a plan, or draw it with --plot (a plan needs its --profile for that)."""
    document = load_document(path, Profile, Plan)
    plan = document if isinstance(document, Plan) else None
    if plan is None and profile_path is not None:
        raise UsageError(f"{path} is a profile, and --profile is for a plan: leave it out, or show the plan")
    if isinstance(document, Profile):
        profile: Profile | None = document
    else:
        profile = Profile.load(profile_path) if profile_path else None
    if plot is not None:
        _draw(profile, plan, plot, depth)
    if as_json:
        _print_records(profile, plan, depth)
    else:
        _print_tables(profile, plan, depth, show_all, reasons, verbose)
        print_written(plot)


def _draw(profile: Profile | None, plan: Plan | None, plot: Path, depth: int) -> None:
    from ..report.figures import draw_plan, draw_profile, save_figure

    if profile is None:
        raise UsageError("drawing a plan needs the times of its profile: add --profile P.json")
    figure = draw_profile(profile, depth=depth) if plan is None else draw_plan(profile, plan)
    save_figure(figure, plot)


def _print_records(profile: Profile | None, plan: Plan | None, depth: int) -> None:
    from ..report.layers import layer_frame
    from ..report.summaries import plan_record, profile_record

    record: dict[str, object] = {}
    if profile is not None:
        record["profile"] = profile_record(profile)
        record["layers"] = layer_frame(profile, plan, depth=depth).reset_index().to_dict(orient="records")
    if plan is not None:
        record["plan"] = plan_record(plan)
        record["decisions"] = {str(value): choice for value, choice in plan.decisions.items()}
    print_json(record)


def _print_tables(
    profile: Profile | None, plan: Plan | None, depth: int, show_all: bool, reasons: bool, verbose: bool
) -> None:
    from ..report import tables

    shown: list[RenderableType] = []
    if plan is not None:
        shown += [tables.plan_table(plan), tables.choices_table(plan)]
        shown += [tables.splits_table(plan)] if plan.splits else []
        shown += [tables.moves_table(plan.persistent)] if plan.persistent is not None else []
        longest = len(plan.choices) if show_all else tables.LONGEST_TABLE
        shown.append(tables.decisions_table(plan, longest=longest, reasons=reasons))
    if profile is not None:
        shown += [] if plan is not None else [tables.profile_table(profile, verbose=verbose)]
        shown.append(tables.layers_table(profile, plan, depth=depth))
    print_tables(*shown)
