"""What `pooch doctor` finds on this machine."""

from __future__ import annotations

from benchmarks.gpu.job import Job, Verdict
from benchmarks.gpu.repeatable import on_device
from pooch.api.doctor import Finding, examination, examine

QUICK = ("clocks", "memory counters", "random numbers", "copies")


def run(job: Job) -> Verdict:
    """Every check, or the quick ones where the run is only rehearsed."""
    device = on_device(job.device)
    checks = [check for check in examination.checks_for(device) if not job.small or check.name in QUICK]
    found = examine(device, limit_s=job.left_s, progress=job.tell, checks=checks)
    for each in found.findings:
        job.add("doctor", _row(each))
    names = ", ".join(each.check for each in found.faults)
    return Verdict("failed", f"not right: {names}") if names else Verdict("passed")


def _row(finding: Finding) -> dict[str, object]:
    figures = "; ".join(f"{name}: {value}" for name, value in finding.figures.items())
    return {"check": finding.check, "result": finding.status, "found": finding.text, "figures": figures}
