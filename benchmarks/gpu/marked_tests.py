"""The tests that are marked as needing a GPU, by pytest, counted from its own report."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.part import Job, Verdict

FOLDERS = (
    *("tests/executor", "tests/workloads", "tests/measure/test_gpu_limits.py"),
    *(
        f"tests/torchtools/test_{name}.py"
        for name in ("accelerators", "memory_on_a_gpu", "requested_sizes", "rounding")
    ),
)
REHEARSED = ("tests/executor/test_gpu.py",)


def run(job: Job) -> Verdict:
    """Run them; passed only if some passed and none failed. Skipped ones are told, with their reasons."""
    report = job.out.with_name("tests.xml")
    report.unlink(missing_ok=True)
    where = REHEARSED if job.small else FOLDERS
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",  # pyproject.toml has settings of plugins that are not on that machine; the limit is ours here
        f"--junitxml={report}",
        *where,
    ]
    job.tell(" ".join(command))
    try:
        subprocess.run(command, timeout=max(1.0, job.left_s), check=False)
    except subprocess.TimeoutExpired:
        return Verdict("failed", "the tests did not end in time")
    if not report.exists():
        return Verdict("failed", "pytest wrote no report")
    return judge(job, report)


def judge(job: Job, report: Path) -> Verdict:
    """From pytest's report to a verdict; failures and skips become notes."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    kinds = Counter(_kind(case) for case in cases)
    job.data["counts"] = dict(kinds)
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error")):
            job.add("notes", f"{case.get('classname')}::{case.get('name')}: {_first_line(problem.get('message', ''))}")
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
    return lines[0][:200] if lines else "no message"
