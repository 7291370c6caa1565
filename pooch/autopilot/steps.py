"""The ways in which a step runs. Each puts hooks and modes in place for its forward pass, and takes them away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Protocol

import torch

from ..executor.compiled import CopiedCalls, FirstCall, PlannedGraphs
from ..executor.evictor import Evictor
from ..executor.mode import following, looking
from ..executor.step import Step
from ..executor.table import Advice
from ..ground.errors import ProfileError
from ..ir import Plan, Profile
from ..profiler.live import LiveTrace
from ..torchtools.endings import end_with
from ..torchtools.mode_stacks import LooseStack
from ..torchtools.standing_aside import CompiledCalls
from .known import Known
from .library import NOT_MEASURED


class Storages(Protocol):
    """Storages by their keys."""

    def get(self, key: int, /) -> int | None:
        """Return the number of what is in a storage, or None if it is not one of them."""


class DrivenStep:
    """A step that is running. Opening and closing it may be interrupted, and closing it may be repeated.

    As it is here, nothing is done in it: it fits.

    Attributes:
        mismatches: Why its plan could not be followed, if it is no plan for this step after all.
        storages: Which storages it follows, by their keys: what is in them may leave as it saves it.
    """

    mismatches: Sequence[str] = ()
    storages: Storages = MappingProxyType({})

    def open(self, compiled: Callable[[], None]) -> None:
        """Put hooks and modes in place.

        Args:
            compiled: Called before the first compiled call, unless the step can have some.
        """

    def around_call(self) -> AbstractContextManager[None]:
        """Surround one outermost call of a governed module."""
        return nullcontext()

    def close_forward(self) -> None:
        """Take hooks and modes away: the backward pass begins, or the program may take its own away."""

    def end(self, is_complete: bool) -> Profile | None:
        """End the step after its backward pass, and return its profile if it was recorded.

        Args:
            is_complete: Whether a backward pass ran to its end.
        """
        return None

    @property
    def left_plan(self) -> bool:
        """Whether the step left its plan."""
        return False


IN_CORE = DrivenStep()  # it has nothing of its own


class GovernedStep(DrivenStep):
    """A step under pressure, with a plan above it or without. It lives as long as autograd holds a handle of it.

    Args:
        step: The step.
        notes_ops: Whether it is to tell which ops it has, even if it replays nothing.

    Attributes:
        follows_plan: Whether there is a plan.
        replays: Whether its ops are recorded, so that values can be replayed.
        effort: What being able to replay has cost and gained so far.
        ops: What tells the ops of its forward pass from others, once that has ended; 0: nothing does.
    """

    ops = 0

    def __init__(self, step: Step, *, notes_ops: bool = False) -> None:
        self._step: Step | None = step
        self._notes_ops = notes_ops
        self.follows_plan, self.replays, self.mismatches = step.guide is not None, step.replays, step.mismatches
        self.storages, self.effort, self._stats = step.values, step.owner.effort, step.stats
        self._forward = LooseStack()
        end_with(self, self._forward.close)

    @classmethod
    def on_plan(cls, evictor: Evictor, plan: Plan, known: Known) -> GovernedStep:
        """Return a step that follows a plan, and goes on under pressure alone where it leaves it.

        Args:
            evictor: Holds the budget.
            plan: The plan.
            known: What is known about this kind of step.

        Raises:
            TierError: If there is no room for what the plan swaps.
        """
        assert known.table is not None
        arena = evictor.engine.open_arena(plan.schedule.host_bytes)
        evictor.stats.device_clock = arena.clock
        return cls(Step(evictor, Advice(known.table, arena, "follow")))

    def open(self, compiled: Callable[[], None]) -> None:
        """Put hooks and modes in place."""
        step = self._step
        assert step is not None
        self._forward.enter_context(following(step, _calls_of(step, compiled), notes_ops=self._notes_ops))

    def around_call(self) -> AbstractContextManager[None]:
        """Watch for reads that are no ops, if a plan empties what the program holds. All is back afterwards."""
        step = self._step
        return nullcontext() if step is None or not step.empties else looking(step)

    @property
    def left_plan(self) -> bool:
        """Whether the step left its plan."""
        return self.follows_plan and bool(self._stats.mismatches)

    def close_forward(self) -> None:
        """Take hooks and modes away."""
        self._forward.close()
        step = self._step
        if step is not None:
            self.ops = step.cursor.ops
            step.end_forward()
        self._step = None  # only autograd's handles keep it from here on


def _calls_of(step: Step, compiled: Callable[[], None]) -> CompiledCalls:
    if not step.replays:
        return CopiedCalls(step)
    if step.guide is not None and step.guide.table.has_graphs:
        return PlannedGraphs(step, compiled)
    return FirstCall(step, compiled)


class RecordedStep(DrivenStep):
    """A step under the online policy that is recorded, and replays nothing.

    Args:
        has_graphs: Whether compiled graphs run in it.
        evictor: Holds the budget.
        models: The governed models.
        persistent_bytes: Bytes that are live before the step.
        workload: Name for the reader of the profile.
    """

    def __init__(
        self,
        evictor: Evictor,
        models: Sequence[torch.nn.Module],
        persistent_bytes: int,
        workload: str,
        *,
        has_graphs: bool = False,
    ) -> None:
        self._has_graphs = has_graphs
        self._workload = workload
        step = Step(evictor)
        self.storages = step.values
        self._trace: LiveTrace | None = LiveTrace(models, step, persistent_bytes)
        end_with(self, self._trace.stop)

    def open(self, compiled: Callable[[], None]) -> None:
        """Begin to record."""
        assert self._trace is not None
        self._trace.open(compiled, has_graphs=self._has_graphs)

    def around_call(self) -> AbstractContextManager[None]:
        """Watch for reads that are no ops."""
        return nullcontext() if self._trace is None else self._trace.around_call()

    def close_forward(self) -> None:
        """Take hooks and modes away; the recording goes on."""
        if self._trace is not None:
            self._trace.close_forward()

    def end(self, is_complete: bool) -> Profile | None:
        """Stop recording."""
        trace = self._trace
        if trace is None:
            return None
        try:
            return trace.profile(NOT_MEASURED, self._workload) if is_complete else None
        except ProfileError:
            return None  # a profiler of the user's ended it, or part of the step ran in another thread
        finally:
            trace.stop()
            self._trace = None
