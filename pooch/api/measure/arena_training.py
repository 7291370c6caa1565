"""Training on an arena: what it served, and whether the numbers are those of training without one.

On a device other than the CPU this happens in a child process, since PyTorch takes another allocator only at the
beginning of one. The training without an arena, with which it is compared, is here and under PyTorch's own allocator.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...ground.errors import PoochError, ProcessEnded
from ...ground.progress import Progress
from ...ir import Plan
from ...workloads.loading import WorkloadFactory
from ..children import Child
from ..wire import WIRE
from .training import (
    StepResult,
    Trained,
    TrainingOptions,
    applied,
    errors_in_one_line,
    first_difference,
    train_under,
)

if TYPE_CHECKING:
    import torch

    from ...allocation import StepArena
    from ...executor.verification import Verify
    from ...torchtools.cpu_allocator.arena_stats import ArenaStats

NO_ARENA = "none"
FIRST_STEPS = 6  # two in which replays are compared, a warm one, two that are recorded, and one beside the packing


@dataclass(frozen=True, slots=True)
class ArenaOutcome:
    """How training on an arena went; fields as in `TrainingReport`.

    Attributes:
        arena: what it served, in one line.
        arena_bytes: of the arena; 0 without one.
        arena_bound_bytes: the highest sum of live bytes in it.
        arena_share_placed: share of the requests that were served from their place.
        arena_difference: to the same training without an arena; None if there is none, or it was not compared.
    """

    arena: str
    arena_bytes: int = 0
    arena_bound_bytes: int = 0
    arena_share_placed: float | None = None
    arena_difference: str | None = None


WIRE.add(WorkloadFactory, StepResult, Trained, ArenaOutcome)
TrainedParts = tuple[Trained, Trained]  # the first steps, and those after them


def train_on_arena(
    factory: WorkloadFactory, plan: Plan | None, device: torch.device, options: TrainingOptions
) -> ArenaOutcome:
    """Train on an arena for a few steps after the first ones, which are recorded.

    Args:
        factory: builds the workload.
        plan: None: plain training.
        device: that the workload is on.
        options: the steps are those that are served; with `check`, train once more without an arena, and compare.
    """
    from ...torchtools.accelerators import has_streams
    from ...torchtools.device_memory import give_memory_back

    steps, progress, verify = options.steps, options.progress, options.verify
    progress("training on an arena")
    outcome: ArenaOutcome
    if has_streams(device):
        give_memory_back(device)  # or that process could not use what this one's allocator caches
        try:
            with Child("train on an arena", imports_as_here=True, passes_on=True) as child:
                parts, outcome = child.ask(factory, plan, steps, verify, progress=progress)
        except ProcessEnded as error:
            return ArenaOutcome(f"none: the process that was to train on an arena failed: {error}")
        except PoochError as error:
            return ArenaOutcome(f"none: {error}")
    else:
        parts, outcome = train(factory, plan, steps, progress, on_arena=True, verify=verify)
    if not options.check or outcome.arena == NO_ARENA:
        return outcome
    alone, _ = train(factory, plan, steps, progress, on_arena=False, verify=verify)
    differences = map(first_difference, alone, parts)
    return replace(outcome, arena_difference=next(filter(None, differences), None))


def served(
    factory: WorkloadFactory, plan: Plan | None, steps: int, verify: Verify, progress: Progress
) -> tuple[TrainedParts, ArenaOutcome]:
    """In the child process: train on an arena of a device whose allocator has to be chosen first."""
    from ..arenas import install_cuda_arena

    install_cuda_arena()
    with errors_in_one_line():
        parts, outcome = train(factory, plan, steps, progress, on_arena=True, verify=verify)
    first, rest = (replace(part, stats=None, plan=None, verified=None) for part in parts)  # what is compared
    return (first, rest), outcome


def train(
    factory: WorkloadFactory, plan: Plan | None, steps: int, progress: Progress, *, on_arena: bool, verify: Verify
) -> tuple[TrainedParts, ArenaOutcome]:
    """Train the first steps, which are recorded, and some more; arguments as of `train_on_arena`."""
    from ..arenas import PlainArena, arena_for

    workload = factory()
    own = arena_for(workload.model) if on_arena and plan is not None else None
    with applied(plan, workload, verify, own) as run, ExitStack() as stack:
        memory: StepArena | PlainArena | None = own
        if on_arena and plan is None:
            memory = stack.enter_context(PlainArena(workload.model))
        first = train_under(workload, run, FIRST_STEPS, progress)
        if memory is not None:
            memory.wait()
        rest = train_under(workload, run, steps, progress)
        return (first, rest), _outcome(None if memory is None else memory.stats)


def _outcome(stats: ArenaStats | None) -> ArenaOutcome:
    if stats is None:
        return ArenaOutcome(NO_ARENA)
    placed = stats.share_placed if stats.counters.placed else None
    return ArenaOutcome(stats.line(), stats.arena_bytes, stats.bound_bytes, placed)
