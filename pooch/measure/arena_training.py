"""Training on an arena: what it served, and whether the numbers are those of training without one.

On a device other than the CPU this happens in a child process, since PyTorch takes another allocator only at the
beginning of one. The training without an arena, with which it is compared, is here and under PyTorch's own allocator.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ..api.children import run_child
from ..api.wire import WIRE
from ..errors import PoochError, ProcessEnded
from ..ir import Plan
from ..progress import Progress
from ..workloads.loading import WorkloadFactory
from .training import StepResult, Trained, TrainingOptions, applied, first_difference, train_under

if TYPE_CHECKING:
    import torch

    from ..allocation import StepArena
    from ..executor.verification import Verify
    from ..torchtools.cpu_allocator.arena_stats import ArenaStats

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


@dataclass(frozen=True, slots=True)
class ArenaTrained:
    """A training on an arena, or without one.

    Attributes:
        parts: the first steps, and those after them.
        stats: what is known about the arena at the end; None without one.
    """

    parts: tuple[Trained, Trained]
    stats: ArenaStats | None

    def record(self) -> dict[str, Any]:
        """As plain data, without what a plan's run counted."""
        parts = [asdict(replace(part, stats=None, plan=None)) for part in self.parts]
        return {"parts": parts, "stats": None if self.stats is None else asdict(self.stats)}

    @staticmethod
    def of(record: dict[str, Any]) -> ArenaTrained:
        """From plain data."""
        from ..torchtools.cpu_allocator import ArenaCounters
        from ..torchtools.cpu_allocator.arena_stats import ArenaStats

        first, rest = (
            Trained(**{**part, "steps": tuple(StepResult(**step) for step in part["steps"])})
            for part in record["parts"]
        )
        stats = record["stats"]
        known = None if stats is None else ArenaStats(**{**stats, "counters": ArenaCounters(**stats["counters"])})
        return ArenaTrained((first, rest), known)


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
    from ..torchtools.accelerators import has_streams

    steps, progress, verify = options.steps, options.progress, options.verify
    progress("training on an arena")
    if has_streams(device):
        try:
            served = _train_in_child(factory, plan, device, options)
        except PoochError as error:
            return ArenaOutcome(f"none: {error}")
    else:
        served = train(factory, plan, steps, progress, on_arena=True, verify=verify)
    stats = served.stats
    if stats is None:
        return ArenaOutcome("none")
    difference = None
    if options.check:
        alone = train(factory, plan, steps, progress, on_arena=False, verify=verify)
        pairs = zip(alone.parts, served.parts, strict=True)
        difference = next((found for pair in pairs if (found := first_difference(*pair)) is not None), None)
    placed = stats.share_placed if stats.counters.placed else None
    return ArenaOutcome(stats.line(), stats.arena_bytes, stats.bound_bytes, placed, difference)


def _train_in_child(
    factory: WorkloadFactory, plan: Plan | None, device: torch.device, options: TrainingOptions
) -> ArenaTrained:
    from ..torchtools.device_memory import give_memory_back

    give_memory_back(device)  # or that process could not use what this one's allocator caches
    job = {"workload": asdict(factory), "plan": WIRE.plain(plan), "steps": options.steps, "verify": options.verify}
    try:
        done = run_child(f"{__package__}.arena_child", job, options.progress, imports_as_here=True)
    except ProcessEnded as error:
        raise PoochError(f"the process that was to train on an arena failed: {error}") from None
    return ArenaTrained.of(done["done"])


def train(
    factory: WorkloadFactory, plan: Plan | None, steps: int, progress: Progress, *, on_arena: bool, verify: Verify
) -> ArenaTrained:
    """Train the first steps, which are recorded, and some more; arguments as of `train_on_arena`."""
    from ..api.arenas import PlainArena, arena_for

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
        return ArenaTrained((first, rest), None if memory is None else memory.stats)
