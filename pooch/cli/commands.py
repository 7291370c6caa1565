"""The commands by name. Each lives in its own file, which is imported when its command is asked for."""

from __future__ import annotations

import importlib

import click

from pooch.plugins import provided

# Name of the command -> one line for `pooch --help`, so that help needs no import.
_COMMANDS = {
    "profile": "Measure one training step.",
    "plan": "Choose keep, swap or recompute under a budget.",
    "run": "Train under a plan, and measure it.",
    "optimize": "Profile, plan, run, measure: all in one.",
    "show": "Look at a profile or a plan.",
    "report": "A plan as one HTML page, with other budgets.",
    "simulate": "Predict a step under a plan.",
    "compare": "Every policy side by side.",
    "max-batch": "The largest batch, volume or sequence that fits.",
    "devices": "What is here, and how fast it copies.",
    "workloads": "The built-in workloads.",
}

_EPILOG = (
    "WORKLOAD is a built-in name (`pooch workloads`) or file.py:function. Exit codes: 0 fine, 1 an error told in one "
    "line, 2 wrong usage, 3 no plan fits into the budget. --debug, anywhere, shows tracebacks."
)


class LazyGroup(click.Group):
    """A group that imports a command's module when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the pipeline; those of optional rooms last."""
        return [*_COMMANDS, *provided("commands")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of that name."""
        if cmd_name in _COMMANDS:
            command: click.Command = importlib.import_module(f".{cmd_name.replace('-', '_')}", __package__).command
            return command
        added = provided("commands").get(cmd_name)
        return None if added is None else added.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `pooch --help`, without importing any of them."""
        with formatter.section("Commands"):
            added = {name: each.summary for name, each in provided("commands").items()}
            formatter.write_dl(list((_COMMANDS | added).items()))


def _print_version(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        import pooch

        click.echo(f"pooch-planner {pooch.__version__}")
        context.exit()


@click.group(cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version.")
def cli() -> None:
    """Train a PyTorch model under a byte budget: keep, swap or recompute each activation."""
