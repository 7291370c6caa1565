"""Training on an arena: what it served, and whether the numbers are those of training without one."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..ir import Plan
from ..progress import Progress
from ..workloads.loading import WorkloadFactory
from .training import Trained, first_difference, train_under

if TYPE_CHECKING:
    from ..allocation import StepArena
    from ..executor import Run
    from ..torchtools.cpu_allocator.arena_stats import ArenaStats

FIRST_STEPS = 4  # a warm one, two that are recorded, and one beside which their blocks are packed


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


def train_on_arena(
    factory: WorkloadFactory, plan: Plan | None, steps: int, progress: Progress, *, check: bool
) -> ArenaOutcome:
    """Train on an arena for a few steps after the first ones, which are recorded.

    Args:
        factory: builds the workload.
        plan: None: plain training.
        steps: that are served.
        progress: called with what is being done.
        check: train once more without an arena, and compare.
    """
    progress("training on an arena")
    served, stats = _train(factory, plan, steps, progress, on_arena=True)
    if stats is None:
        return ArenaOutcome("none")
    difference = None
    if check:
        alone, _ = _train(factory, plan, steps, progress, on_arena=False)
        pairs = zip(alone, served, strict=True)
        difference = next((found for pair in pairs if (found := first_difference(*pair)) is not None), None)
    placed = stats.share_placed if stats.counters.placed else None
    return ArenaOutcome(stats.line(), stats.arena_bytes, stats.bound_bytes, placed, difference)


def _train(
    factory: WorkloadFactory, plan: Plan | None, steps: int, progress: Progress, *, on_arena: bool
) -> tuple[list[Trained], ArenaStats | None]:
    """The first steps and those after them, and what is known about the arena at their end."""
    from ..api.arenas import PlainArena, arena_for
    from ..executor import apply_plan

    workload = factory()
    with ExitStack() as stack:
        run: Run | None = None
        memory: StepArena | PlainArena | None = None
        if plan is not None:
            own = arena_for(workload.model) if on_arena else None
            run = stack.enter_context(apply_plan(plan, workload.model, measure_every=None, memory=own))
            memory = own
        elif on_arena:
            memory = stack.enter_context(PlainArena(workload.model))
        first = train_under(workload, run, FIRST_STEPS, progress)
        if memory is not None:
            memory.wait()
        rest = train_under(workload, run, steps, progress)
        return [first, rest], None if memory is None else memory.stats
