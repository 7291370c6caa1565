"""A plan that is applied to a model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

import torch

from ..ground.errors import TierError, UsageError
from ..ground.units import format_bytes, plural
from ..ground.visible import one_line
from ..ir import Plan
from ..torchtools import accelerators, cuda_only
from ..torchtools.cpu_allocator.arena_stats import ArenaStats
from ..torchtools.endings import run_lost
from ..torchtools.lost_interrupts import LOST_INTERRUPTS
from ..torchtools.memory_meter import MemoryMeter
from ..torchtools.raw_looks import RawLooks
from ..torchtools.split import SplitCalls, watching_losses
from ..torchtools.standing_aside import StepHooks
from ..torchtools.training_state import model_device
from .attachment import Attachment
from .causes import Overrun
from .compiled import KeptCalls, PlannedGraphs
from .engines.protocol import Arena, CopyEngine
from .floor import Floor
from .kept_step import KeptStep
from .mode import watching
from .observed import ObservedStep
from .own_work import OWN_WORK
from .snapshot import StepSnapshot
from .statistics import RunStats, RunTotals, WarnOnce
from .status import Mode, Status, predicted_slowdown
from .step import Step
from .table import ActionTable, Advice
from .verification import Verification, Verified, Verify
from .watch import MEASURE_EVERY, RunWatch

OnMismatch = Literal["warn", "error"]


class _ThreadStep(threading.local):
    """Whether the thread is in the region of a planned step. Nested calls belong to that step's plan."""

    active = False


_STEP = _ThreadStep()


class StepMemory(Protocol):
    """Where the memory of steps comes from. A step lasts from one `begin_step` to the next."""

    @property
    def stats(self) -> ArenaStats:
        """What is known about it."""

    def begin_step(self) -> None:
        """Begin a step of the calling thread, and so end the one before."""

    def close(self) -> None:
        """End it."""


class Run:
    """A plan that is applied to a model. `remove()`, or leaving it as a context manager, takes the plan off again.

    Under a plan of region "model" every call of the model with gradients enabled follows the plan. Under a plan of
    region "step" the user marks the region with `with run.step(): loss = forward()`; the backward pass follows outside.

    Args:
        plan: The plan, checked against the model.
        model: The model; only a weak reference is held.
        engine: The copy engine, closed by `remove()`.
        on_mismatch: "warn" or "error", for steps that leave the path.
        measure_every: On a CPU, measure the peak of every step whose number is a multiple of this. 0 measures none.
        on_overrun: Called with each measured peak over the budget; returns whether it was handled.
        memory: Where the memory of the steps comes from, closed by `remove()`. None leaves it to PyTorch.
        verify: How closely replays are compared with what they replace, see `verification.py`.

    Raises:
        TierError: If the swap tier cannot be set up.
        UsageError: If the model was compiled since it was planned, or is already under a plan.
    """

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        engine: CopyEngine,
        on_mismatch: OnMismatch,
        measure_every: int = MEASURE_EVERY,
        on_overrun: Callable[[Overrun], bool] | None = None,
        memory: StepMemory | None = None,
        verify: Verify = "first",
    ) -> None:
        self._plan = plan
        self._model = weakref.ref(model)
        self._engine, self._on_mismatch = engine, on_mismatch
        self._device = model_device(model)
        self._table = ActionTable.of(plan)
        self._stats = RunStats()
        self._inside = threading.local()
        self._warn_once = warn_once = WarnOnce()
        engine.health.tell = lambda text: warn_once(text, text)
        self._verification = Verification(verify, self._warn_once)
        self._verification.ban(map(self._table.copies.key, plan.banned))
        compares = verify != "off"
        self._floor = Floor(
            plan.budget_bytes,
            plan.persistent_bytes,
            max((choice.size_bytes for choice in plan.choices), default=0),
            engine,
            self._device,
            self._verification,
            warn_once,
        )
        self._watch = RunWatch(
            plan,
            model,
            self._device,
            self._warn_once,
            measure_every,
            on_overrun,
            compares,
            engine.health,
            self._floor.device_peak_bytes,
            partial(getattr, self._floor, "missing_bytes"),
        )
        self._removed = self._paused = self._begun = False
        self._step_type: type[Step] = Step
        self._memory: StepMemory | None = None  # not closed by a run that could not be made
        # Fail now rather than in the middle of a step.
        rooms = [engine.open_arena(plan.schedule.host_bytes) for _ in range(plan.microbatches_in_flight)]
        for room in rooms:
            room.close()
        outside = None if self._table.does_nothing else self._warn_outside
        region = self._region if plan.region == "model" else self._unmarked
        self._attachment = Attachment(model, region, outside, has_graphs=self._table.has_graphs)
        self._memory = memory
        LOST_INTERRUPTS.use(self)

    @property
    def plan(self) -> Plan:
        """The plan, with the recipes that were banned so far: saved, and applied again, it does not use them."""
        key = self._table.copies.key
        banned = sorted(value for value in self._table.recomputed if self._verification.is_banned(key(value)))
        return self._plan if len(banned) == len(self._plan.banned) else replace(self._plan, banned=tuple(banned))

    @property
    def does_replay(self) -> bool:
        """Whether the plan recomputes anything."""
        return bool(self._table.recomputed)

    @property
    def verified(self) -> Verified:
        """Which recipes gave the same bytes so far, and which did not."""
        return self._verification.verified

    @property
    def model(self) -> torch.nn.Module:
        """The model. The run does not keep it alive.

        Raises:
            UsageError: If the model is gone.
        """
        model = self._model()
        if model is None:
            raise UsageError("the model of this plan is gone: keep it as long as its run")
        return model

    @property
    def stats(self) -> RunStats:
        """Counters of the last step that was begun."""
        if accelerators.has_streams(self._device):
            self._stats.peak_bytes = self._floor.device_peak_bytes()
            self._stats.reserved_bytes = accelerators.peak_reserved_bytes(self._device)
        return self._stats

    @property
    def totals(self) -> RunTotals:
        """Counters over all steps so far."""
        if self._memory is not None:
            self._watch.totals.arena = self._memory.stats
        return self._watch.totals

    @contextmanager
    def _unmarked(self) -> Iterator[None]:
        """Wrap a call of the model under a plan of region "step", which only applies inside of `run.step()`."""
        if not self._is_idle():
            self._warn_outside("")
        yield

    def _warn_outside(self, part: str) -> None:
        """Warn once that the model, or a submodule, runs where the plan does nothing."""
        if self._is_idle():
            return
        if self._plan.region == "step":
            self._warn_once(
                "outside",
                "the model runs outside of `with run.step():`, so the plan does nothing: wrap the forward pass in it, "
                "or plan with region='model'",
            )
        else:
            self._warn_once(
                "outside",
                f"module {part!r} runs outside of a call of the model, so the plan does nothing: call model(...) and "
                "not model.forward(...) or parts of the model, or plan with region='step' and use `with run.step():`",
            )

    def _is_idle(self) -> bool:
        """Whether no warning is due: the run is paused, the region is marked, or gradients are disabled."""
        return self._paused or getattr(self._inside, "entered", False) or not torch.is_grad_enabled()

    @contextmanager
    def step(self) -> Iterator[RunStats]:
        """Mark the region of a plan of region "step": the forward pass up to the loss.

        Yields:
            The counters of the step.

        Raises:
            UsageError: If the plan is of region "model" or was removed, or if the model was compiled in the meantime.
        """
        if self._plan.region != "step":
            raise UsageError("this plan covers calls of the model already: plan with region='step' to use run.step()")
        if self._removed:
            raise UsageError("this plan was taken off the model: apply it again")
        self._inside.entered = True
        try:
            with self._region():
                yield self._stats
        finally:
            self._inside.entered = False

    def forward_region(self) -> AbstractContextManager[object]:
        """`step()` under a plan of region "step", else an empty context: for loops that accept plans of any region."""
        return self.step() if self._plan.region == "step" else nullcontext()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Train plainly inside of this context, to compare planned and plain steps in turns."""
        self._paused = True
        try:
            with self._floor.resting():
                yield
        finally:
            self._paused = False

    @contextmanager
    def _region(self) -> Iterator[None]:
        if self._paused or _STEP.active or not torch.is_grad_enabled() or self._bypassed():
            if self._paused:
                self._floor.rest()
            yield
            return
        if accelerators.has_streams(self._device):
            accelerators.reset_peaks(self._device)
        self._begun = True
        if self._memory is not None:
            self._memory.begin_step()
        self._stats = RunStats(peak_bytes=self._stats.peak_bytes, reserved_bytes=self._stats.reserved_bytes)
        self._watch.begin(self._stats)
        if self._table.does_nothing:
            if not self._plan.splits and not self._watch.is_measuring:
                yield
                return
            if self._plan.splits:
                self._attachment.refuse_compiled()
            with self._in_slices(None), self._keeping() if self._watch.is_measuring else nullcontext():
                yield
            return
        self._engine.health.tell_if_slow()
        _refuse_capture()
        self._attachment.refuse_compiled()
        self._verification.begin_step([self.model])
        self._floor.begin_step(self._stats)
        _STEP.active = True
        OWN_WORK.is_over()
        run_lost()
        try:
            with self._planned_step():
                yield
        finally:
            _STEP.active = False

    def _bypassed(self) -> bool:
        """Whether hooks do not see saved tensors, as in a transform, or the model is only traced or exported."""
        if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
            return True
        seen = torch._C._functorch.peek_interpreter_stack() is None and _hooks_are_allowed()
        if not seen and not self._table.does_nothing:
            self._warn_once(
                "bypassed",
                "the step runs in a torch.func transform, or with saved tensor hooks disabled, so the plan does not "
                "apply and activations are kept: use loss.backward(), or provide memory for a plain step",
            )
        return not seen

    def _new_step(self, arena: Arena) -> Step:
        self._stats.device_clock = arena.clock
        return self._step_type(self._floor, Advice(self._table, arena, self._on_mismatch))

    @contextmanager
    def _planned_step(self) -> Iterator[None]:
        try:
            arena = self._engine.open_arena(self._plan.schedule.host_bytes)
        except TierError as error:  # the tier was there when the plan was applied: training goes on without
            self._engine.health.failed(error)
            self._stats.kept_bytes = self._plan.schedule.host_bytes
            with self._in_slices(None), self._keeping():
                yield
            return
        step = self._new_step(arena)
        with self._watch.following(step):
            calls = PlannedGraphs(step) if self._table.has_graphs else None
            with self._in_slices(step), watching(step, calls):
                yield
            step.end_forward()
        self._floor.live.raise_failure()

    @contextmanager
    def _in_slices(self, step: Step | None) -> Iterator[None]:
        """Run the calls in slices that the plan names; `step` is None where nothing moves and nothing is watched."""
        if not self._plan.splits:
            yield
            return
        named = [split.fingerprint for split in self._plan.splits]
        calls = SplitCalls(frozenset(named), None if step is None else step.writing_over)
        with watching_losses(calls):
            yield
        if step is None and len(calls.made) < len(named):
            self._warn_once(
                "whole",
                f"the plan runs {named[0]} in slices, and the step has no such call; the loss ran whole and may exceed "
                "the budget (profile and plan again to follow the new path)",
            )

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Measure a step in which nothing is done: hooks keep everything, and only notice the backward pass."""
        step = KeptStep(self._stats, self._floor.silence)
        assignments, hooks = RawLooks(None, step.data_assigned), StepHooks(step.pack, step.unpack, None, KeptCalls())
        with self._watch.following(step), assignments, hooks:
            yield

    @contextmanager
    def measured(self) -> Iterator[RunStats]:
        """Measure the peak of the forward and backward pass inside, into `stats.peak_bytes`.

        Only needed on the CPU, whose allocator keeps no counters. It slows the step down a little.

        Yields:
            The counters of the step.
        """
        with self._watch.measured_outside() as tell_peak:
            with MemoryMeter(self._device) as meter:
                yield self._stats
            self._stats.peak_bytes, self._stats.reserved_bytes = meter.peak_bytes, meter.reserved_bytes
            self._stats.rounding_bytes = meter.rounding_bytes
            tell_peak(meter.peak_bytes)

    def mark_values(self) -> None:
        """Mark in recorded traces, from the next step on, which storage holds which value. Python watches the steps."""
        self._table.native_use.is_refused = True
        self._step_type = ObservedStep

    def snapshot(self) -> StepSnapshot:
        """Save what the next step may change, so that the step can be repeated. The caller closes the snapshot.

        Raises:
            TierError: If gradients accumulate and the tier cannot take them.
        """
        return StepSnapshot(self.model, self._engine, self._device)

    def remove(self) -> None:
        """Take the plan off the model. Steps that are running finish under the plan."""
        if self._removed:
            return
        self._removed = True
        LOST_INTERRUPTS.leave(self)
        self._watch.stop()
        # Training that bypasses the plan, as after model.compile(), goes unnoticed except for the changed parameters.
        if not self._begun and not self._table.does_nothing and self._attachment.was_trained():
            self._warn_once(
                "outside",
                "the model was trained and the plan was never used: call model(...) (or use `with run.step():` under a "
                "plan of region 'step') as it was when the plan was applied, without torch.compile",
            )
        self._attachment.remove()
        self._floor.stop()
        self._engine.close()
        if self._memory is not None:
            self._memory.close()

    def status(self) -> Status:
        """How the last step ran, for a progress bar or a log; `status().as_dict()` has names such as "pooch/peak_mib".

        On a CPU, the peak is that of the last measured step.
        """
        stats, totals, plan = self.stats, self.totals, self._plan
        if not totals.steps:
            return Status.of(0, "none", None, plan.budget_bytes or None, None)
        mode: Mode = "off-path" if stats.mismatches else "in-core" if self._table.does_nothing else "plan"
        slowdown = None if stats.mismatches else predicted_slowdown(plan)
        return Status.of(totals.steps, mode, stats.peak_bytes, plan.budget_bytes or None, slowdown)

    def __repr__(self) -> str:
        budget = f", budget {format_bytes(self._plan.budget_bytes)}" if self._plan.budget_bytes else ""
        state = " (removed)" if self._removed else ""
        return f"Run({one_line(self._plan.workload) or 'a step'}{budget}, {plural(self.totals.steps, 'step')}){state}"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


_hooks_are_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def _refuse_capture() -> None:
    """Refuse a graph capture: what the host does between ops would be missing when the graph is replayed."""
    if cuda_only.is_capturing():
        raise UsageError(
            "a planned step cannot be captured into a CUDA graph: capture without the plan, or train without the graph"
        )
