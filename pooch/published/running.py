"""Runs an experiment: answers every row with every method, unless the answer is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from ..ground.errors import UsageError
from ..ground.progress import PlanningProgress, silent
from .answering import answer
from .claims import Verdict, verdicts
from .profiles import Profiles
from .recording import Recording
from .rows import Answer, Experiment, Row

Part = Literal["all", "simulated", "measured"]
TIME_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Reproduced:
    """An experiment with its answers.

    Attributes:
        experiment: what was run.
        simulated: the selected rows that are simulated.
        measured: the selected rows that are measured.
        answers: to the selected rows.
        verdicts: on the claims about the selected rows.
    """

    experiment: Experiment
    simulated: tuple[Row, ...]
    measured: tuple[Row, ...]
    answers: tuple[Answer, ...]
    verdicts: tuple[Verdict, ...]


class _RowProgress:
    """Reports progress, with the share of rows that are answered."""

    def __init__(self, progress: PlanningProgress, asked: int) -> None:
        self.done = 0
        self._progress = progress
        self._asked = asked

    def __call__(self, text: str) -> None:
        self._progress(text, self.done / self._asked)


def reproduce(
    experiment: Experiment,
    *,
    rows: Sequence[str] = (),
    methods: Sequence[str] = (),
    quick: bool = False,
    part: Part = "all",
    folder: Path | None = None,
    again: bool = False,
    only_recorded: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
    progress: PlanningProgress = silent,
) -> Reproduced:
    """Answer rows of an experiment.

    Args:
        experiment: whose rows are answered.
        rows: keys, or patterns such as "resnet50-*". Empty: all rows.
        methods: names, or patterns such as "pooch_*": only these answer. Empty: all methods of each row.
        quick: answer only the rows that represent the others.
        part: "simulated" on the paper's hardware, "measured" on this machine, or "all".
        folder: where answers are recorded. None: nowhere.
        again: whether to answer recorded rows again.
        only_recorded: return the recorded answers and run nothing.
        time_limit_s: limit in seconds for each plan.
        progress: called with a description of the current work and the share that is done.

    Raises:
        UsageError: no row, or no method of a row, matches the patterns.
        FileFormatError: the record cannot be read or written.
    """
    recording = Recording(experiment.name, folder)
    simulated = () if part == "measured" else _chosen(experiment.rows, rows, quick)
    measured = () if part == "simulated" else _chosen(experiment.measured, rows, quick)
    chosen = (*simulated, *measured)
    if rows and not chosen:
        known = ", ".join(row.key for row in (*experiment.rows, *experiment.measured))
        raise UsageError(f"no row of {experiment.name} matches {' or '.join(rows)}: choose from {known}")
    asked = [(row, method) for row in chosen for method in row.methods if _matches(method, methods)]
    if methods and not asked:
        known = ", ".join(dict.fromkeys(method for row in chosen for method in row.methods))
        raise UsageError(f"no method of {experiment.name} matches {' or '.join(methods)}: choose from {known}")
    row_progress = _RowProgress(progress, len(asked))
    profiles = Profiles(row_progress)
    for done, (row, method) in enumerate(asked):
        row_progress.done = done
        if only_recorded or (not again and recording.answer(row, method) is not None):
            continue
        recording.add(row, answer(row, method, profiles, time_limit_s, row_progress))
    answers = recording.answers(chosen)
    keys = {row.key for row in simulated}
    judged = tuple(each for each in verdicts(experiment, answers) if each.claim.row in keys)
    return Reproduced(experiment, simulated, measured, answers, judged)


def _chosen(rows: tuple[Row, ...], patterns: Sequence[str], quick: bool) -> tuple[Row, ...]:
    return tuple(row for row in rows if (row.quick or not quick) and _matches(row.key, patterns))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
