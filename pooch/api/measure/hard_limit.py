"""Hard limits: training in a child process that cannot take more memory than the budget.

On a GPU, the allocator gets a fraction of the device memory. The budget bounds the bytes that tensors have allocated,
and the fraction bounds the bytes that the allocator has reserved, unused parts of its segments included. So the limit
is the budget, plus what the allocator was seen to reserve beyond its tensors in a step without the limit, plus a fixed
slack. The allocator uses exact sizes there (`expandable_segments`), or blocks that it does not split would count as
used.

On a CPU, the limit is on the address space of the process: what it takes after the model is built and before it
computes, plus what the budget leaves above the model's own bytes, plus a fixed slack for what is no tensor (stacks,
code that oneDNN generates, two small copy buffers).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ground.errors import PoochError
from ...ground.progress import Progress
from ...ir import Plan
from ...workloads.loading import WorkloadFactory
from ..children import Child
from ..wire import WIRE

if TYPE_CHECKING:
    import torch

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # every version knows the first name
SLACK_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LimitedOutcome:
    """How training under a hard limit ended.

    Attributes:
        survived: whether all steps were completed.
        message: the error that ended it, in one line; empty if it survived.
        losses: of the completed steps.
        slack_bytes: granted above the budget; None if the limit was never set.
        arena: what an arena served, in one line; None if none was asked for, or the process died before.
    """

    survived: bool
    message: str
    losses: tuple[float, ...]
    slack_bytes: int | None = None
    arena: str | None = None


@dataclass(frozen=True, slots=True)
class LimitedJob:
    """Training under a hard limit.

    Attributes:
        factory: builds the workload in the child process.
        plan: None: plain training.
        budget_bytes: the limit without the slack.
        steps: number of steps under the limit.
        in_core_peak_bytes: of the plain step, which runs once before the limit is set if it has room. None: not known.
        slack_bytes: granted above the budget. None: what the child process finds to be needed.
        on_arena: train on an arena; steps are recorded under the limit, too, and `steps` more follow.
    """

    factory: WorkloadFactory
    plan: Plan | None
    budget_bytes: int
    steps: int
    in_core_peak_bytes: int | None = None
    slack_bytes: int | None = None
    on_arena: bool = False


WIRE.add(WorkloadFactory, LimitedJob)


def train_limited(job: LimitedJob, progress: Progress) -> LimitedOutcome:
    """Train in a child process that cannot take more than the budget and a slack; `progress`: told what is being done.

    Raises:
        PoochError: the child process failed before the limit was set, for another reason than memory.
    """
    beside = " on an arena" if job.on_arena else ""
    progress(f"{'planned' if job.plan else 'plain'} training{beside} under a hard limit")
    told: dict[str, list[Any]] = {"slack_bytes": [], "loss": []}
    limited = Child("train under a limit", imports_as_here=True, environment=exact_allocator(os.environ))
    with limited as child:
        try:
            message, arena = child.ask(job, progress=lambda name, value: told[name].append(value))
        except PoochError as error:
            if not told["slack_bytes"]:
                raise PoochError(f"the limited process failed before its limit was set: {error}") from None
            message, arena = f"the process died: {error}", None
    slack_bytes = next(iter(told["slack_bytes"]), None)
    return LimitedOutcome(not message, message, tuple(told["loss"]), slack_bytes, arena)


def exact_allocator(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment, with the CUDA caching allocator set to split blocks down to 512 bytes unless the user set it.

    By default it splits a large block only if more than 1 MiB would be left, and counts the whole block as allocated.
    """
    if any(name in environment for name in _ALLOCATOR_VARIABLES):
        return dict(environment)
    return {**environment, _ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def limit_gpu(device: torch.device, budget_bytes: int, slack_bytes: int = SLACK_BYTES) -> int:
    """Limit this process's GPU memory to the budget and the slack; returns the limit in bytes."""
    from ...torchtools import accelerators, cuda_only

    accelerators.empty_cache(device)
    total_bytes = accelerators.total_bytes(device)
    limit_bytes = min(total_bytes, budget_bytes + slack_bytes)
    cuda_only.limit_memory(device, limit_bytes / total_bytes)
    return limit_bytes
