"""The commands by name. Each has its own file, which is imported when the command is used."""

from __future__ import annotations

import importlib

import click

from ..ground.plugins import provided
from ..ground.wording import did_you_mean

# One line each for `pooch --help`, so that help imports no command.
_COMMANDS = {
    "profile": "Measure one training step.",
    "plan": "Choose keep, swap or recompute under a budget.",
    "run": "Train under a plan, and measure it.",
    "optimize": "Profile, plan, run and measure.",
    "exec": "Run any training script under a budget.",
    "show": "Show a profile or a plan.",
    "report": "Write a plan as one HTML page, with other budgets.",
    "export": "Write a plan for PyTorch's memory viewer.",
    "simulate": "Predict a step under a plan.",
    "compare": "Compare policies side by side.",
    "max-batch": "Find the largest batch, volume or sequence that fits.",
    "pack": "Place blocks with known lifetimes in one arena.",
    "devices": "List devices and their transfer rates.",
    "doctor": "Examine this machine: is everything as it should be?",
    "workloads": "List the built-in workloads.",
}

# click leaves a paragraph after "\b" as it is.
_HELP = """Train a PyTorch model within a memory budget: keep, swap or recompute each activation.

\b
To begin, run a training script of yours as it is:
    pooch exec --budget 60% train.py
"""

_EPILOG = (
    "WORKLOAD is a built-in name (`pooch workloads`) or file.py:function. Exit codes: 0 success, 1 an error, 2 "
    "wrong usage, 3 no plan fits into the budget. --debug, anywhere, shows tracebacks."
)


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the pipeline, then those of optional packages."""
        return [*_COMMANDS, *provided("commands")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of that name."""
        if cmd_name in _COMMANDS:
            command: click.Command = importlib.import_module(f".{cmd_name.replace('-', '_')}", __package__).command
            return command
        added = provided("commands").get(cmd_name)
        return None if added is None else added.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or say which one may be meant."""
        name = args[0]
        if name.endswith(".py"):
            ctx.fail(f"{name!r} is no command: to train under a budget, write `pooch exec --budget 60% {name}`.")
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {name!r}: {did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `pooch --help`, without importing the commands."""
        with formatter.section("Commands"):
            added = {name: each.summary for name, each in provided("commands").items()}
            formatter.write_dl(list((_COMMANDS | added).items()))


def _print_version(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        from ..ground.version import VERSION

        click.echo(f"pooch-planner {VERSION}")
        context.exit()


@click.group(cls=LazyGroup, help=_HELP, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def cli() -> None:
    """The group that all commands belong to."""
