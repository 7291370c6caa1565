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
    report = job.out.with_name("tests.xml")
    report.unlink(missing_ok=True)
    command = command_of(part, report, job.small)
    job.tell(" ".join(command))
    variables = part.variables if job.device == "cuda" else {}
    try:
        subprocess.run(command, timeout=max(1.0, job.left_s), check=False, env={**os.environ, **variables})
    except subprocess.TimeoutExpired:
        return Verdict("failed", "the tests did not end in time")
    if not report.exists():
        return Verdict("failed", "pytest wrote no report")
    return judge(job, report)


def command_of(part: DevicePart, report: Path, small: bool) -> list[str]:
    """Of pytest. What pyproject.toml sets for plugins that may not be there is left out; the limit of time is ours."""
    beside = ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") and not small else []
    fixed = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}"]
    paths = [part.rehearsed] if small else part.paths
    return [sys.executable, "-m", "pytest", *fixed, *beside, *part.options, *paths]


def judge(job: Job, report: Path) -> Verdict:
    """From pytest's report to a verdict; failures and skips become notes."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
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
