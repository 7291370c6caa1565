"""What `pooch exec` does in a process that may train: the one it runs the script in, or one that the script starts."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

from ..autopilot.finding import ModelFinder
from ..autopilot.summary import AutoSummary
from ..ground import messages
from ..ground.errors import PoochError, first_line
from ..torchtools.ranks import Ranks, is_distributed, own_rank
from .governing import Governing
from .run_times import RunTimes, process_age_s

_PACKAGE = __package__.rpartition(".")[0]  # `pooch` in a checkout, `pooch_planner` in a wheel
_TRAINING_S = 1.0  # of a processor's time: importing PyTorch alone takes more


class GovernedProcess:
    """Holds the budget in this process, prints what happened, and writes the page.

    Args:
        governing: How.
        is_started_by_script: Whether the script has started this process. It need not train.

    Raises:
        UsageError: As of `ModelFinder`.

    Attributes:
        started_processes: How many processes the script has started from here that hold the budget as well.
    """

    def __init__(self, governing: Governing, *, is_started_by_script: bool = False) -> None:
        self.governing, self._is_started_by_script = governing, is_started_by_script
        tell = messages.be_silent if governing.quiet else self._tell
        self._finder = ModelFinder(governing.budget, tell=tell, **governing.options)
        self._process, self._starting_s = os.getpid(), 0.0
        self._is_concluded = False
        self._rank: int | None = None
        self.started_processes = 0

    def start(self) -> None:
        """Begin to look for models."""
        self._starting_s = process_age_s()
        if self.governing.report is not None:
            self._watch_live_page()
        self._finder.start()

    def is_here(self) -> bool:
        """Whether models are looked for in this process, as in one that was forked before any was found."""
        if self._process == os.getpid():
            return True
        if not self._finder.go_on_in_fork():
            return False
        self._process, self._is_started_by_script = os.getpid(), True
        self._starting_s, self.started_processes = 0.0, 0
        if self.governing.report is not None:
            self._watch_live_page()
        return True

    def conclude(self) -> None:
        """Conclude, once, unless this is a worker that the script has forked."""
        if os.getpid() != self._process or self._is_concluded:
            return
        self._is_concluded = True
        begin_s = time.monotonic()
        summary = self._finder.stop(verbose=self.governing.verbose)
        if summary is None or not summary.steps:
            if not self._is_started_by_script:
                self._tell_that_nothing_was_held()
            return
        if not self.governing.quiet:
            times = RunTimes(self._starting_s, self._finder.preparing_s, time.monotonic() - begin_s, process_age_s())
            verdict, *others = (line.removeprefix("pooch: ") for line in str(summary).splitlines())
            for line in (verdict, times.line(summary), *others):
                self._tell(line)
        if self.governing.report is not None:
            self._write_page(self.governing.report)

    def _tell_that_nothing_was_held(self) -> None:
        if self.started_processes and not self._finder.refusals:
            processes = "a process" if self.started_processes == 1 else f"{self.started_processes} processes"
            self._tell(
                f"no step was run under the budget here: the script has started {processes} through multiprocessing, "
                "and each that trains holds the budget and prints its own summary"
            )
            return
        why = self._finder.refusals or ["no model with trainable parameters was called with gradients enabled"]
        if not self._finder.refusals and os.times().children_user > _TRAINING_S:
            why.append(
                "processes that were started other than through multiprocessing hold none: have their launcher run "
                f"Pooch in each, as in torchrun -m {_PACKAGE} exec --budget {self.governing.budget} train.py"
            )
        self._tell(f"no step was run under the budget: {'; '.join(why)}")

    # The page ---------------------------------------------------------------------------------------------------------

    def _watch_live_page(self) -> None:
        from ..report.page.live import LivePage

        def summary() -> AutoSummary | None:
            return None if self._finder.auto is None else self._finder.auto.summary()

        LivePage(self._page_path, self.governing.script, summary, command=self.governing.typed).watch()

    def _page_path(self) -> Path:
        """The page of this process."""
        report = self.governing.report
        assert report is not None
        rank = self._known_rank()
        if rank is None and self._is_started_by_script:
            return report.with_stem(f"{report.stem}.{multiprocessing.current_process().name}")
        return report.with_stem(f"{report.stem}.rank{rank}") if rank else report

    def _write_page(self, report: Path) -> None:
        from ..report.page.run import write_run_report

        auto, path = self._finder.auto, self._page_path()
        assert auto is not None
        try:
            write_run_report(
                auto.summary(), auto.planned, path, title=self.governing.script, command=self.governing.typed
            )
        except PoochError as error:
            self._tell(f"the report was not written: {error}")
            return
        if not self.governing.quiet:
            self._tell(f"wrote {path}: open it in a browser")

    # Ranks ------------------------------------------------------------------------------------------------------------

    def tell_of_failure(self, error: BaseException) -> None:
        """Tell which of several ranks failed first: its launcher ends the others, or their next collective fails."""
        if _world_size() == 1 or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return
        ranks = Ranks("exec") if is_distributed() else None
        other = None if ranks is None else ranks.failure()
        if other is not None:
            self._tell(f"{other}; so this rank ends as well")
            return
        if ranks is not None:
            ranks.fail(error)
        rank = _told_by_launcher("RANK", 0)
        self._tell(f"rank {rank} failed: {type(error).__name__}: {first_line(error)}; the other ranks end with it")

    def _known_rank(self) -> int | None:
        """This process's number among ranks, also when their process group is gone, or None if it is not known."""
        if _world_size() > 1:
            self._rank = _told_by_launcher("RANK", 0)
        elif (rank := own_rank()) is not None:
            self._rank = rank
        return self._rank

    def _tell(self, text: str) -> None:
        rank = self._known_rank()
        own_name = multiprocessing.current_process().name if self._is_started_by_script else None
        name = own_name if rank is None else f"rank {rank}"
        messages.report(text, speaker="pooch" if name is None else f"pooch ({name})")


def _world_size() -> int:
    return _told_by_launcher("WORLD_SIZE", 1)


def _told_by_launcher(name: str, otherwise: int) -> int:
    given = os.environ.get(name, "")
    return int(given) if given.isdigit() else otherwise
