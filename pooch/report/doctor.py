"""What `pooch doctor` found, as a page and as a file."""

from __future__ import annotations

from ..api.doctor import Examination
from ..ground.anonymous import without_names
from .fitting import Column, FittedTable

_SHOWN = {"passed": "yes", "told": "note", "failed": "NO", "not run": "not run"}


def doctor_verdict(examination: Examination) -> str:
    """The first line."""
    seconds, many = f"{examination.elapsed_s:.0f} s", len(examination.findings)
    if not examination.faults:
        notes = sum(each.status == "told" for each in examination.findings)
        noted = f", {notes} with a note" if notes else ""
        return f"Nothing is wrong on {examination.device}: {many} checks in {seconds}{noted}"
    few, names = len(examination.causes), ", ".join(each.check for each in examination.causes)
    others = len(examination.faults) - len(examination.causes)
    rest = f"; {others} more {'was' if others == 1 else 'were'} not run" if others else ""
    verb = "is" if few == 1 else "are"
    return f"{few} of {many} checks on {examination.device} {verb} not right ({seconds}): {names}{rest}"


def doctor_table(examination: Examination) -> FittedTable:
    """Every check, with what it found."""
    table = FittedTable(
        f"examination of {examination.device}",
        [Column("check", "label"), Column("right", "word"), Column("what was found", "text")],
    )
    for each in examination.findings:
        table.add_row(each.check, _SHOWN[each.status], each.text)
    return table


def doctor_record(examination: Examination) -> dict[str, object]:
    """The file to attach to a report: all figures, and no names of users, hosts or directories."""
    record: dict[str, object] = without_names(examination.as_record())
    return record
