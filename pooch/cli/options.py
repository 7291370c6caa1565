"""Options that several commands share, declared once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from pooch.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PATH = click.Path(path_type=Path)


def workload_options(function: Function) -> Function:
    """WORKLOAD, --batch-size, --device, --set."""
    for decorate in reversed(
        (
            click.argument("workload"),
            click.option("--batch-size", type=int, metavar="N", help="Items per step (default: the workload's own)."),
            click.option("--device", metavar="cpu|cuda", help="Where to train (default: the workload's own)."),
            click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the workload."),
        )
    ):
        function = decorate(function)
    return function


def planning_options(function: Function) -> Function:
    """--policy, --time-limit, --host-budget."""
    for decorate in reversed(
        (
            click.option("--policy", default="ilp", show_default=True, help="Who decides."),
            time_limit_option,
            click.option("--host-budget", metavar="BYTES", help="Most bytes in the swap tier (default: no limit)."),
        )
    ):
        function = decorate(function)
    return function


def training_options(function: Function) -> Function:
    """--steps, --check, --hard-limit."""
    for decorate in reversed(
        (
            click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to train."),
            click.option("--check", is_flag=True, help="Train plainly first and compare bitwise."),
            click.option("--hard-limit", is_flag=True, help="Make the budget physical: a plan that lies dies."),
        )
    ):
        function = decorate(function)
    return function


time_limit_option = click.option(
    "--time-limit",
    "time_limit_s",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Most seconds to plan for.",
)


def region_option(default: str) -> Decorator:
    """--region."""
    return click.option(
        "--region",
        type=click.Choice(["model", "step"]),
        default=default,
        show_default=True,
        help="What the plan covers: model.forward, or the whole step with the loss.",
    )


json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable results on stdout.")
force_option = click.option("--force", is_flag=True, help="Overwrite the output files.")
mode_option = click.option(
    "--mode",
    type=click.Choice(["auto", "run", "offload"]),
    default="auto",
    show_default=True,
    help="How to profile: plainly, with everything swapped, or whichever works.",
)


def output_option(help_text: str, *, required: bool = False) -> Decorator:
    """-o/--output."""
    return click.option("-o", "--output", type=PATH, required=required, metavar="FILE", help=help_text)


def refuse_overwriting(path: Path | None, force: bool) -> None:
    """Stop before any work is done where an output file is there already.

    Raises:
        UsageError: it is, and `--force` was not given.
    """
    if path is None:
        return
    refuse_existing(path, force)
    if not path.resolve().parent.is_dir():
        raise UsageError(f"the folder of {path} does not exist: make it first, or give another name")


def refuse_existing(path: Path, force: bool) -> None:
    """Stop where the file is there already and `--force` was not given.

    Raises:
        UsageError: so it is.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists already: give --force to overwrite it, or another name")
