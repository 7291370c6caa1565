"""Making the budget physical: training in a process of its own that cannot take more memory than the budget.

On a GPU the allocator gets a fraction of the card. The budget is about what tensors have allocated, and the fraction
about what the allocator has reserved, free pieces of its segments included. So the limit is the budget, plus what the
allocator was seen to reserve beyond its tensors in a step without the limit, plus a fixed slack. It keeps to exact
sizes there (`expandable_segments`), or what it does not split would count as if it were used. On the CPU the process's
address space is limited to what it has with the model built and nothing computing, plus what the budget
leaves above the model's own bytes, plus a fixed slack for what is no tensor (stacks, code that oneDNN generates, two
small copy buffers).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pooch.api.children import child_environment
from pooch.errors import PoochError
from pooch.ir import Plan
from pooch.workloads.loading import WorkloadFactory

if TYPE_CHECKING:
    import torch

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first name is known to every version
SLACK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LimitedOutcome:
    """How training went under a physical limit.

    Attributes:
        survived: all steps went through. message: how it died, in one line ("" where it survived).
        losses: of the steps that were completed.
        slack_bytes: granted above the budget; None where the limit was never set.
    """

    survived: bool
    message: str
    losses: tuple[float, ...]
    slack_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class LimitedJob:
    """What the child process is told; plain data. The last two are as `train_limited` takes them."""

    workload: str
    batch_size: int | None
    device: str | None
    settings: dict[str, object]
    plan_path: str | None
    budget_bytes: int
    steps: int
    in_core_peak_bytes: int | None = None
    slack_bytes: int | None = None


def train_limited(
    factory: WorkloadFactory,
    plan: Plan | None,
    budget_bytes: int,
    steps: int,
    progress: Callable[[str], None],
    *,
    in_core_peak_bytes: int | None = None,
    slack_bytes: int | None = None,
) -> LimitedOutcome:
    """Train in a child process that cannot take more than the budget and a slack.

    Args:
        factory: builds the workload in the child.
        plan: None: plain training.
        budget_bytes: the limit.
        steps: under the limit.
        progress: told what is being done.
        in_core_peak_bytes: of the plain step, which is only run without the limit where it has room; None: not known.
        slack_bytes: granted above the budget; None: what the child finds to be needed while it settles.

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
            str(plan_path) if plan else None, budget_bytes, steps, in_core_peak_bytes, slack_bytes,
        )  # fmt: skip
        command = [sys.executable, "-m", "pooch.measure.limited_child"]
        child = subprocess.run(
            command,
            input=json.dumps(asdict(job)),
            capture_output=True,
            text=True,
            check=False,
            env=exact_allocator(child_environment()),
        )
    return _read_outcome(child)


def exact_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment in which the CUDA caching allocator splits blocks down to 512 bytes; the user's own settings stay.

    By default a large block is split only if more than 1 MiB of it is left, and what is not split counts as allocated.
    """
    if any(name in environment for name in _ALLOCATOR_VARIABLES):
        return dict(environment)
    return {**environment, _ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def limit_gpu(device: torch.device, budget_bytes: int, slack_bytes: int = SLACK_BYTES) -> int:
    """Let this process take no more of the GPU than the budget and the slack; returns that limit in bytes."""
    from pooch.torchtools import accelerators, cuda_only

    accelerators.empty_cache(device)
    total_bytes = accelerators.total_bytes(device)
    limit_bytes = min(total_bytes, budget_bytes + slack_bytes)
    cuda_only.limit_memory(device, limit_bytes / total_bytes)
    return limit_bytes


def _read_outcome(child: subprocess.CompletedProcess[str]) -> LimitedOutcome:
    events = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    if not any("limit_bytes" in event or "died" in event for event in events):
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise PoochError(f"the limited process failed before its limit was set: {last}")
    losses = tuple(event["loss"] for event in events if "loss" in event)
    slack_bytes = next((event["slack_bytes"] for event in events if "slack_bytes" in event), None)
    if any("done" in event for event in events):
        return LimitedOutcome(True, "", losses, slack_bytes)
    died = next((event["died"] for event in events if "died" in event), None)
    return LimitedOutcome(False, died or f"the process died (exit status {child.returncode})", losses, slack_bytes)
