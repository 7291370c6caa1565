"""One part of the tests that run on a CUDA device (`tests.device_parts`), counted from pytest's own report."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.job import Job, Verdict
from tests.device_parts import PARTS, DevicePart

PREFIX = "tests:"
FAILURE_TAIL = 3000
PROCESSES = min(12, max(2, (os.cpu_count() or 2) * 3 // 4))  # beside one another, where pytest-xdist is there


def run(job: Job) -> Verdict:
    """Run them; passed only if some passed and none failed. Skipped ones are told, with their reasons."""
    part = next(part for part in PARTS if PREFIX + part.name == job.name)
    variables = part.variables if job.device == "cuda" else {}
    reports = []
    for processes in _at_once(job.small):
        report = job.out.with_name(f"tests-{processes}.xml")
        report.unlink(missing_ok=True)
        command = command_of(part, report, job.small, processes)
        job.tell(" ".join(command))
        try:
            subprocess.run(command, timeout=max(1.0, job.left_s), check=False, env={**os.environ, **variables})
        except subprocess.TimeoutExpired:
            return Verdict("failed", "the tests did not end in time")
        if not report.exists():
            return Verdict("failed", "pytest wrote no report")
        reports.append(report)
    return judge(job, *reports)


def command_of(part: DevicePart, report: Path, small: bool, processes: int) -> list[str]:
    """Of pytest. What pyproject.toml sets for plugins that may not be there is left out; the limit of time is ours.

    Args:
        part: which tests.
        report: where pytest writes what became of them.
        small: whether the run is only rehearsed.
        processes: how many run tests beside one another. Tests that take the whole card run in one process alone.
    """
    beside = ["-n", str(processes)] if processes > 1 else []
    fixed = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}"]
    marks = [part.marks] if part.marks else []
    if len(_at_once(small)) > 1:
        marks.append("whole_card" if processes == 1 else "not whole_card")
    paths = [part.rehearsed] if small else part.paths
    return [sys.executable, "-m", "pytest", *fixed, *beside, "-m", " and ".join(marks), *part.options, *paths]


def _at_once(small: bool) -> tuple[int, ...]:
    """In how many processes pytest runs tests, in turn."""
    return (PROCESSES, 1) if importlib.util.find_spec("xdist") and not small else (1,)


def judge(job: Job, *reports: Path) -> Verdict:
    """From pytest's reports to a verdict; failures and skips become notes."""
    cases = [case for report in reports for case in ElementTree.parse(report).getroot().iter("testcase")]
    kinds = Counter(_kind(case) for case in cases)
    job.data["counts"] = dict(kinds)
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('classname')}::{case.get('name')}"
            job.add("notes", f"{name}: {_first_line(problem.get('message', ''))}")
            job.add("failures", f"{name}\n{(problem.text or '')[-FAILURE_TAIL:]}")
    skipped = Counter(_first_line(s.get("message", "")) for case in cases for s in case.findall("skipped"))
    for reason, count in skipped.items():
        job.add("notes", f"{count} skipped: {reason}")
    told = ", ".join(f"{kinds[kind]} {kind}" for kind in ("passed", "failed", "skipped") if kinds[kind])
    if kinds["failed"]:
        return Verdict("failed", told)
    return Verdict("passed", told) if kinds["passed"] else Verdict("not run", told or "pytest found no marked tests")


def _kind(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


def _first_line(text: str) -> str:
    lines: Sequence[str] = text.strip().splitlines()
    return lines[0][:400] if lines else "no message"
