"""`pooch exec`: run a training script under a budget, unchanged."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import PoochError, UsageError, first_line
from ..visible import visible
from .options import force_option, output_option, verify_option

if TYPE_CHECKING:
    from ..autopilot.finding import ModelFinder
    from ..executor.verification import Verify


class ProgramCommand(click.Command):
    """A command whose last arguments are a program's: what follows the script, or `-m MODULE`, is left as it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Mark where the options of the command end."""
        return super().parse_args(ctx, self._marked(args))

    def _marked(self, args: list[str]) -> list[str]:
        takes_value = {
            name for each in self.params if isinstance(each, click.Option) and not each.is_flag for name in each.opts
        }
        place = 0
        while place < len(args) and args[place].startswith("-"):
            if args[place].startswith("-m"):
                end = place + (2 if args[place] == "-m" else 1)
                return [*args[:end], "--", *args[end:]]
            place += 2 if args[place] in takes_value else 1
        return args


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
    help="16GiB, 800MB, a number of bytes, or 60%: of the in-core peak of the first step.",
)
@click.option(
    "--host-budget",
    metavar="BYTES",
    help="Limit on the bytes in the swap tier of this machine, shared by its ranks (default: none).",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIRECTORY",
    help="Where plans are kept for the next run (default: nowhere).",
)
@verify_option
@output_option("--report", help="Write what happened, and the plans, as one HTML page.")
@click.option("--quiet", is_flag=True, help="Print neither plans nor the summary on standard error.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT] [ARGUMENTS]...")
@force_option
def command(
    budget: str,
    host_budget: str | None,
    cache: Path | None,
    verify: Verify,
    report: Path | None,
    quiet: bool,
    module: str | None,
    program: tuple[str, ...],
) -> Callable[[], None]:
    """Run SCRIPT as `python SCRIPT ARGUMENTS...` does, and hold a budget over all training in it.

    The script stays as it is: each model is found when it is first trained. Losses and gradients are bitwise those of
    plain training. What follows SCRIPT, or -m MODULE, is for the script, whose exit code becomes that of the command.
    --debug stands before `exec`.
    """
    from .scripts import module_runner, script_runner

    if module is None and not program:
        raise UsageError("there is no script: give one, as in `pooch exec --budget 16GiB train.py`, or -m MODULE")
    run = script_runner(program[0], program[1:]) if module is None else module_runner(module, program)
    if report is not None:
        from ..report.page.writing import plotly_source

        plotly_source()  # that it is missing should not be found after hours of training

    from ..autopilot.finding import ModelFinder

    tell = _nothing if quiet else _tell
    finder = ModelFinder(budget, host_budget=host_budget, cache=cache, tell=tell, verify=verify)

    def governed() -> None:
        # Called by Python before it ends, after the script's threads and whatever way the script ends.
        atexit.register(_conclude, finder, os.getpid(), report, quiet, script=module or program[0])
        finder.start()
        try:
            run()
        except BaseException as error:
            _tell_of_failure(error)
            raise

    return governed


def _tell_of_failure(error: BaseException) -> None:
    """Tell which of several ranks failed first: its launcher ends the others, or their next collective fails."""
    if _world_size() == 1 or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return
    from ..torchtools.ranks import Ranks, is_distributed

    ranks = Ranks("exec") if is_distributed() else None
    other = None if ranks is None else ranks.failure()
    if other is not None:
        _tell(f"{other}; so this rank ends as well")
        return
    if ranks is not None:
        ranks.fail(error)
    _tell(f"rank {_rank()} failed: {type(error).__name__}: {first_line(error)}; the other ranks end with it")


def _conclude(finder: ModelFinder, process: int, report: Path | None, quiet: bool, *, script: str) -> None:
    """Print the summary, and write the page."""
    if os.getpid() != process:  # a worker that the script has forked
        return
    summary = finder.stop()
    if summary is None or not summary.steps:
        why = finder.refusals or ["no model with trainable parameters was called with gradients enabled"]
        _tell(f"no step was run under the budget: {'; '.join(why)}")
        return
    if not quiet:
        for line in str(summary).splitlines():
            _tell(line.removeprefix("pooch: "))
    if report is not None:
        _write_page(finder, report, script, quiet)


def _write_page(finder: ModelFinder, report: Path, script: str, quiet: bool) -> None:
    from ..report.page.run import write_run_report

    assert finder.auto is not None
    path = report.with_stem(f"{report.stem}.rank{_rank()}") if _rank() else report
    try:
        write_run_report(finder.auto.summary(), finder.auto.planned, path, title=script)
    except PoochError as error:
        _tell(f"the report was not written: {error}")
        return
    if not quiet:
        _tell(f"wrote {path}: open it in a browser")


def _rank() -> int:
    """This process's number among those that `torchrun` has started."""
    given = os.environ.get("RANK", "0")
    return int(given) if given.isdigit() else 0


def _world_size() -> int:
    given = os.environ.get("WORLD_SIZE", "1")
    return int(given) if given.isdigit() else 1


def _tell(text: str) -> None:
    who = f"pooch (rank {_rank()})" if _world_size() > 1 else "pooch"
    sys.stderr.write(f"{who}: {visible(text)}\n")
    sys.stderr.flush()


def _nothing(text: str) -> None:
    pass
