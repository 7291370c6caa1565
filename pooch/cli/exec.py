"""`pooch exec`: run a training script under a budget, unchanged."""

from __future__ import annotations

import atexit
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..ground import messages
from ..ground.errors import PoochError, UsageError, first_line
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
from .run_times import RunTimes, process_age_s

if TYPE_CHECKING:
    from ..api.recompute import AllowRecompute
    from ..autopilot.budget import Bound
    from ..autopilot.finding import ModelFinder
    from ..autopilot.summary import AutoSummary
    from ..executor.verification import Verify
    from ..report.page.live import LivePage


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
    help="16GiB, 800MB, a number of bytes, 60%: of what the first step takes without Pooch, or auto: what is free, "
    "looked at anew as steps begin.",
)
@device_option("Where to train models that the script builds on the host (default: where they are).")
@click.option(
    "--host-budget",
    metavar="BYTES",
    help="Limit on the bytes in the swap tier of this machine, shared by its ranks (default: none).",
)
@click.option("--disk-budget", metavar="BYTES", help="The same where the swap tier is on disk, as for a CPU.")
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
    from .scripts import module_runner, script_runner

    if module is None and not program:
        raise UsageError("there is no script: give one, as in `pooch exec --budget 16GiB train.py`, or -m MODULE")
    refuse_missing_device(device)
    if spill_directory is not None:
        use_spill_directory(spill_directory)
    run = script_runner(program[0], program[1:]) if module is None else module_runner(module, program)
    if report is not None:
        from ..report.page.writing import plotly_source

        plotly_source()  # that it is missing should not be found after hours of training

    from ..autopilot.finding import ModelFinder

    tell = messages.be_silent if quiet else _tell
    budgets = {"host_budget": host_budget, "disk_budget": disk_budget}
    finder = ModelFinder(
        budget, device=device, **budgets, cache=cache, tell=tell, verify=verify, bound=bound,
        allow_recompute=allow_recompute,
    )  # fmt: skip

    typed = command_line()  # before the script has a command line of its own
    conclusion = _Conclusion(finder, os.getpid(), report, quiet, verbose, module or program[0], typed)

    def governed() -> None:
        # Called by Python before it ends, after the script's threads and whatever way the script ends.
        atexit.register(conclusion, process_age_s())
        if report is not None:
            conclusion.live_page().watch()
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


@dataclass(frozen=True, slots=True)
class _Conclusion:
    """Prints the summary, and writes the page.

    Attributes:
        finder: What held the budget.
        process: The process that it was held in.
        report: The page to write, or None.
        quiet: Whether nothing is printed.
        verbose: Whether what Pooch did inside of the steps is printed too.
        script: What was run.
        typed: The command line.
    """

    finder: ModelFinder
    process: int
    report: Path | None
    quiet: bool
    verbose: bool
    script: str
    typed: str

    def __call__(self, starting_s: float) -> None:
        """Conclude, unless this is a worker that the script has forked."""
        if os.getpid() != self.process:
            return
        begin_s = time.monotonic()
        summary = self.finder.stop(verbose=self.verbose)
        if summary is None or not summary.steps:
            why = self.finder.refusals or ["no model with trainable parameters was called with gradients enabled"]
            _tell(f"no step was run under the budget: {'; '.join(why)}")
            return
        if not self.quiet:
            times = RunTimes(starting_s, self.finder.preparing_s, time.monotonic() - begin_s, process_age_s())
            verdict, *others = (line.removeprefix("pooch: ") for line in str(summary).splitlines())
            for line in (verdict, times.line(summary), *others):
                _tell(line)
        if self.report is not None:
            self._write_page()

    def live_page(self) -> LivePage:
        """The page while the script runs."""
        from ..report.page.live import LivePage

        def summary() -> AutoSummary | None:
            return None if self.finder.auto is None else self.finder.auto.summary()

        return LivePage(self._page_path(), self.script, summary, command=self.typed)

    def _page_path(self) -> Path:
        """The page of this rank."""
        assert self.report is not None
        return self.report.with_stem(f"{self.report.stem}.rank{_rank()}") if _rank() else self.report

    def _write_page(self) -> None:
        from ..report.page.run import write_run_report

        auto, path = self.finder.auto, self._page_path()
        assert auto is not None
        try:
            write_run_report(auto.summary(), auto.planned, path, title=self.script, command=self.typed)
        except PoochError as error:
            _tell(f"the report was not written: {error}")
            return
        if not self.quiet:
            _tell(f"wrote {path}: open it in a browser")


def _rank() -> int:
    """This process's number among those that `torchrun` has started."""
    return _told_by_launcher("RANK", 0)


def _world_size() -> int:
    return _told_by_launcher("WORLD_SIZE", 1)


def _told_by_launcher(name: str, otherwise: int) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isdigit() else otherwise


def _tell(text: str) -> None:
    messages.report(text, speaker=f"pooch (rank {_rank()})" if _world_size() > 1 else "pooch")
