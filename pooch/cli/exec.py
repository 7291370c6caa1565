"""`pooch exec`: run a training script under a budget, unchanged."""

from __future__ import annotations

import atexit
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..ground.errors import UsageError
from .checks import refuse_missing_device, use_spill_directory
from .options import (
    allow_recompute_option,
    choice_option,
    device_option,
    force_option,
    output_option,
    spill_option,
    verbose_option,
    verify_option,
)
from .output import command_line

if TYPE_CHECKING:
    from ..api.recompute import AllowRecompute
    from ..autopilot.budget import Bound
    from ..executor.verification import Verify


class ProgramCommand(click.Command):
    """A command whose last arguments are a program's: what follows the script, or `-m MODULE`, is left as it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Mark where the options of the command end."""
        own, others = self._parted(args)
        self._refuse_misplaced_budget(own, others)
        return super().parse_args(ctx, own + others)

    def _refuse_misplaced_budget(self, own: list[str], others: list[str]) -> None:
        """Say where --budget belongs, if it stands behind the script and nowhere else.

        Raises:
            UsageError: it does.
        """
        given = [each.partition("=")[0] for each in others]
        if "--budget" not in given or {each.partition("=")[0] for each in own} & {"--budget", "--help", "-h"}:
            return
        place = given.index("--budget")
        taken = 1 if "=" in others[place] else 2
        moved = [*others[place : place + taken], *own, *others[:place], *others[place + taken :]]
        written = shlex.join(each for each in moved if each != "--")
        raise UsageError(f"--budget stands after the script, so it goes to the script: write pooch exec {written}")

    def _parted(self, args: list[str]) -> tuple[list[str], list[str]]:
        """The arguments of the command, marked where they end with a module, and those that follow them."""
        options = [each for each in self.params if isinstance(each, click.Option) and not each.is_flag]
        take_values = {name for each in options for name in each.opts}
        place, mark = 0, list[str]()
        while place < len(args) and args[place].startswith("-") and args[place] != "--" and not mark:
            has_value = args[place] != "-m" or place + 1 < len(args)  # without one, click says so
            mark = ["--"] if args[place].startswith("-m") and has_value else []
            place += 2 if args[place] in take_values else 1
        return [*args[:place], *mark], args[place:]


@click.command(
    "exec",
    cls=ProgramCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="--budget BYTES [OPTIONS]",
)
@click.option(
    "--budget",
    required=True,
    metavar="BYTES",
    help="16GiB, 800MB, a number of bytes, 60% of what the first step takes without Pooch, or auto: what is free, "
    "checked again as steps begin.",
)
@device_option("Where to train models that the script builds on the host (default: where they are).")
@click.option(
    "--host-budget",
    metavar="BYTES",
    help="Limit on the bytes in the swap tier of this machine, shared by its ranks (default: none).",
)
@click.option("--disk-budget", metavar="BYTES", help="The same for a swap tier on disk, as a CPU has it.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="Where plans are kept for the next run (default: nowhere).",
)
@choice_option(
    "--bound",
    ["live", "reserved"],
    "live",
    "What the budget bounds: tensors, or on a CUDA device what PyTorch's allocator reserves for them.",
)
@spill_option()
@verify_option
@allow_recompute_option
@output_option("--report", help="Write what happened, and the plans, as one HTML page; rewritten while SCRIPT runs.")
@verbose_option
@click.option("--quiet", is_flag=True, help="Print neither plans nor the summary on standard error.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [ARGUMENTS]...")
@force_option
def command(
    budget: str,
    device: str | None,
    host_budget: str | None,
    disk_budget: str | None,
    cache: Path | None,
    bound: Bound,
    spill_directory: Path | None,
    verify: Verify,
    allow_recompute: AllowRecompute,
    report: Path | None,
    verbose: bool,
    quiet: bool,
    module: str | None,
    program: tuple[str, ...],
) -> Callable[[], None]:
    """Run SCRIPT as `python SCRIPT ARGUMENTS...` does, and hold a budget over all training in it.

    The script stays as it is: each model is found when it is first trained. Losses and gradients are bitwise those of
    plain training. What follows SCRIPT, or -m MODULE, is for the script, whose exit code becomes that of the command.
    --debug stands before `exec`.
    """
    from .governed_process import GovernedProcess
    from .governing import Governing
    from .scripts import module_runner, script_runner
    from .started_processes import govern_started_processes

    if module is None and not program:
        raise UsageError("there is no script: give one, as in `pooch exec --budget 16GiB train.py`, or -m MODULE")
    refuse_missing_device(device)
    if spill_directory is not None:
        use_spill_directory(spill_directory)
    run = script_runner(program[0], program[1:]) if module is None else module_runner(module, program)
    if report is not None:
        from ..report.page.writing import plotly_source

        plotly_source()  # that it is missing should not be found after hours of training

    options = {
        "device": device, "host_budget": host_budget, "disk_budget": disk_budget, "cache": cache, "verify": verify,
        "bound": bound, "allow_recompute": allow_recompute,
    }  # fmt: skip
    typed = command_line()  # before the script has a command line of its own
    process = GovernedProcess(Governing(budget, options, report, quiet, verbose, module or program[0], typed))

    def governed() -> None:
        process.start()
        # Called by Python before it ends, after the script's threads and whatever way the script ends.
        atexit.register(process.conclude)
        govern_started_processes(process)
        try:
            run()
        except BaseException as error:
            process.tell_of_failure(error)
            raise

    return governed
