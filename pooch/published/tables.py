"""Tables of published experiments: the paper's figures, those of each method and of the integer program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..ground.units import format_bytes, format_ms
from ..report.fitting import Column, FittedTable, Kind
from ..report.summaries import Record
from .claims import claim_text
from .papers import published_figure
from .rows import Answer, Experiment, Row
from .running import Reproduced

_BEST = "ilp"
_NOTHING = "-"
WIDEST = 16  # columns
LEAST_SAVING = 0.01  # overhead, as a share of the in-core step: less is nothing to save
_QUESTIONS = {
    "slowdown": "Slowdown compared with in-core",
    "largest": "Largest size that fits (multiple of the in-core size, relative throughput)",
}
_MARKS = {"read": "", "abstract": " [abstract]", "recalled": " [recalled]"}


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of text, for a terminal or for Markdown.

    Attributes:
        title: above the table.
        columns: headings.
        rows: cells.
        prose: whether the cells are text, aligned to the left, rather than figures.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    prose: bool = False

    def rich(self) -> FittedTable:
        """Return the table for a terminal."""
        kind: Kind = "text" if self.prose else "figures"
        names, *others = self.columns
        table = FittedTable(self.title, [Column(names, "text"), *(Column(each, kind) for each in others)])
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        """Return the table for a page."""
        side = "---" if self.prose else "---:"
        lines = [" | ".join(self.columns), " | ".join(["---", *(side for _ in self.columns[1:])])]
        lines += [" | ".join(row) for row in self.rows]
        return f"**{self.title}**\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


def reproduction_tables(reproduced: Reproduced) -> list[TextTable]:
    """Return a table for each question, modelled and measured, then the claims."""
    tables = []
    for rows, place in ((reproduced.simulated, "modelled, not measured"), (reproduced.measured, "measured here")):
        for question in _QUESTIONS:
            chosen = [row for row in rows if row.question == question]
            if chosen:
                table = _table(reproduced, chosen, f"{_QUESTIONS[question]}; {place}")
                tables.append(_turned(table) if len(table.columns) > WIDEST else table)
    others = (_courses_table(reproduced), _claims_table(reproduced))
    return [*tables, *(table for table in others if table.rows)]


def _table(reproduced: Reproduced, rows: Sequence[Row], title: str) -> TextTable:
    answers = {(answer.row, answer.method): answer for answer in reproduced.answers}
    methods = list(dict.fromkeys(method for row in rows for method in row.methods if method != "keep_all"))
    measured = rows[0].is_measured
    savings = _savings(reproduced.experiment)
    columns = ("", "in-core", *(() if measured else ("paper",)), *methods)
    bound = rows[0].question == "slowdown"
    lines = []
    for row in rows:
        found = [answers.get((row.key, method)) for method in methods]
        known = next((each for each in answers.values() if each.row == row.key), None)
        cells = [row.title, _in_core(row, known)]
        cells += [] if measured else [_paper(reproduced.experiment, row)]
        cells += [_cell(row, each) for each in found]
        cells += [_bound(answers.get((row.key, _BEST)))] if bound else []
        cells += [_saved(reproduced.experiment, answers, row, changed) for changed in savings]
        lines.append(tuple(cells))
    extra = (("lower bound",) if bound else ()) + tuple(f"saved by {changed}" for changed in savings)
    return TextTable(title, (*columns, *extra), tuple(lines))


def _turned(table: TextTable) -> TextTable:
    """Return the table with rows and columns exchanged, for many methods."""
    lines = list(zip(table.columns, *table.rows, strict=True))
    return TextTable(table.title, lines[0], tuple(lines[1:]))


def _in_core(row: Row, known: Answer | None) -> str:
    if known is None:
        return _NOTHING
    if row.question == "largest":
        return str(known.in_core_largest) if known.in_core_largest else "none"
    peak = format_bytes(known.in_core_peak_bytes or 0)
    return f"{peak}, {format_ms(known.in_core_step_ms or 0.0)}"


def _paper(experiment: Experiment, row: Row) -> str:
    figure = published_figure(experiment.name, row.key)
    return _NOTHING if figure is None else figure.text + _MARKS[figure.known]


def _cell(row: Row, answer: Answer | None) -> str:
    if answer is None:
        return _NOTHING
    if not answer.fits:
        return f"needs {format_bytes(answer.needs_bytes or 0)}"
    return _slowdown_cell(answer) if row.question == "slowdown" else _largest_cell(answer)


def _slowdown_cell(answer: Answer) -> str:
    if answer.measured_slowdown is None:
        return _lost(answer.slowdown)
    peak, half = format_bytes(answer.measured_peak_bytes or 0), answer.measured_quartiles
    spread = f"half of the turns {_lost(half[0])} to {_lost(half[1])}; " if half else ""
    return f"{_lost(answer.measured_slowdown)} ({spread}predicted {_lost(answer.slowdown)}), {peak}"


def _largest_cell(answer: Answer) -> str:
    shown = []
    if answer.multiple is not None:
        shown.append(f"{answer.multiple:.2f}x")
    if answer.measured_items_per_s and answer.measured_in_core_items_per_s:
        shown.append(f"{answer.measured_items_per_s / answer.measured_in_core_items_per_s:.0%} measured")
    if answer.relative_throughput is not None:
        predicted = " predicted" if answer.measured_items_per_s else ""
        shown.append(f"{answer.relative_throughput:.0%}{predicted}")
    if answer.measured_peak_bytes is not None:
        shown.append(f"{format_bytes(answer.measured_peak_bytes)} of {format_bytes(answer.budget_bytes)}")
    return f"{answer.largest} ({', '.join(shown)})" if shown else str(answer.largest)


def _lost(slowdown: float | None) -> str:
    return _NOTHING if slowdown is None else f"{100 * slowdown:+.1f}%"


def _bound(answer: Answer | None) -> str:
    return _NOTHING if answer is None else _lost(answer.least_slowdown)


def _savings(experiment: Experiment) -> tuple[str, ...]:
    return () if experiment.saving is None else (experiment.saving.changed, _BEST)


def _saved(experiment: Experiment, answers: dict[tuple[str, str], Answer], row: Row, changed: str) -> str:
    """How much of the overhead or time of the base a method saves; measured values if the row was measured."""
    saving = experiment.saving
    if saving is None:
        return _NOTHING
    base, other = answers.get((row.key, saving.base)), answers.get((row.key, changed))
    costs = [None if each is None else _cost(row, each, saving.of) for each in (base, other)]
    before, after = costs
    if before is None or after is None or before < LEAST_SAVING:
        return _NOTHING
    return f"{100 * (1 - after / before):.1f}%"


def _cost(row: Row, answer: Answer, of: str) -> float | None:
    lost = answer.measured_slowdown if row.is_measured else answer.slowdown
    if lost is None:
        return None
    return lost if of == "overhead" else 1 + lost


def _courses_table(reproduced: Reproduced) -> TextTable:
    """Hours of whole trainings, and each relative to the last."""
    answers = {each.row: each for each in reproduced.answers if each.method == _BEST and each.step_ms is not None}
    courses = [course for course in reproduced.experiment.courses if course.row in answers]
    hours = [course.steps * (answers[course.row].step_ms or 0.0) / 3_600_000 for course in courses]
    rows = tuple(
        (
            course.title,
            f"{course.steps:,}",
            format_ms(answers[course.row].step_ms or 0.0),
            f"{each:.1f} h ({each / hours[-1]:.2f}x)",
            f"{course.paper_hours:g} h ({course.paper_hours / courses[-1].paper_hours:.2f}x){_MARKS[course.known]}",
        )
        for course, each in zip(courses, hours, strict=True)
    )
    return TextTable("Hours of a training; modelled", ("", "steps", "step", _BEST, "paper"), rows)


def _claims_table(reproduced: Reproduced) -> TextTable:
    words = {True: "reached", False: "NOT reached", None: "open"}
    rows = tuple(
        (verdict.title, claim_text(verdict.claim), verdict.result, words[verdict.reached])
        for verdict in reproduced.verdicts
    )
    return TextTable("Claims about the integer program; modelled", ("", "claim", "result", ""), rows, True)


def reproduction_record(reproduced: Reproduced) -> Record:
    """Return the result for `--json`."""
    return {
        "experiment": reproduced.experiment.name,
        "answers": [
            asdict(answer)
            | {"slowdown": answer.slowdown, "multiple": answer.multiple, "measured_slowdown": answer.measured_slowdown}
            for answer in reproduced.answers
        ],
        "papers": [
            asdict(figure)
            for row in reproduced.simulated
            if (figure := published_figure(reproduced.experiment.name, row.key)) is not None
        ],
        "claims": [
            {"row": each.claim.row, "claim": claim_text(each.claim), "found": each.result, "reached": each.reached}
            for each in reproduced.verdicts
        ],
    }
