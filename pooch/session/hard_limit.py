"""Making the budget physical: training in a process of its own that cannot take more memory than the budget.

On a GPU the allocator gets a fraction of the card. On the CPU the process's address space is limited to what it has
with the
model built and nothing computing, plus what the budget leaves above the model's own bytes, plus a fixed slack
for what is no tensor (stacks, code that oneDNN generates, two small copy buffers).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pooch.errors import PoochError
from pooch.ir import Plan
from pooch.workloads.loading import WorkloadFactory

SLACK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LimitedOutcome:
    """How training went under a physical limit.

    Attributes:
        survived: all steps went through. message: how it died, in one line ("" where it survived).
        losses: of the steps that were completed.
    """

    survived: bool
    message: str
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LimitedJob:
    """What the child process is told; plain data."""

    workload: str
    batch_size: int | None
    device: str | None
    settings: dict[str, object]
    plan_path: str | None
    budget_bytes: int
    steps: int


def train_limited(
    factory: WorkloadFactory, plan: Plan | None, budget_bytes: int, steps: int, progress: Callable[[str], None]
) -> LimitedOutcome:
    """Train in a child process that cannot take more than the budget.

    Raises:
        PoochError: the child failed before the limit was set, for another reason than memory.
    """
    progress(f"{'planned' if plan else 'plain'} training under a hard limit")
    with tempfile.TemporaryDirectory(prefix="pooch-") as folder:
        plan_path = Path(folder) / "plan.json"
        if plan is not None:
            plan.save(plan_path)
        job = LimitedJob(
            factory.name, factory.batch_size, factory.device, dict(factory.settings),
            str(plan_path) if plan else None, budget_bytes, steps,
        )  # fmt: skip
        command = [sys.executable, "-m", "pooch.session.limited_child"]
        child = subprocess.run(command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False)
    return _read_outcome(child)


def _read_outcome(child: subprocess.CompletedProcess[str]) -> LimitedOutcome:
    events = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    if not any("limit_bytes" in event for event in events):
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise PoochError(f"the limited process failed before its limit was set: {last}")
    losses = tuple(event["loss"] for event in events if "loss" in event)
    if any("done" in event for event in events):
        return LimitedOutcome(True, "", losses)
    died = next((event["died"] for event in events if "died" in event), None)
    return LimitedOutcome(False, died or f"the process died (exit status {child.returncode})", losses)
