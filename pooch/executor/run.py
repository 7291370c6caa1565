"""Attaching a plan to a model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from pooch.errors import PlanMismatch, PoochError, UsageError
from pooch.executor.actions import StepActions
from pooch.executor.attachment import Attachment
from pooch.executor.causes import Overrun
from pooch.executor.engines import make_engine
from pooch.executor.engines.protocol import CopyEngine
from pooch.executor.mode import StepMode, WatchfulMode
from pooch.executor.repeatable import refuse_unrepeatable
from pooch.executor.snapshot import StepSnapshot
from pooch.executor.statistics import RunStats, RunTotals
from pooch.executor.step import PlannedStep
from pooch.executor.table import ActionTable
from pooch.executor.warn_once import WarnOnce
from pooch.executor.watch import MEASURE_EVERY, RunWatch
from pooch.ir import Plan
from pooch.ir.executable import check_executable
from pooch.torchtools import accelerators, cuda_only
from pooch.torchtools.calls import refuse_taken
from pooch.torchtools.memory_meter import MemoryMeter
from pooch.torchtools.raw_looks import RawLooks
from pooch.torchtools.tensors import model_signature
from pooch.torchtools.training_state import model_device

OnMismatch = Literal["warn", "error"]


class _ThreadStep(threading.local):
    """Whether a thread is in the region of a planned step: what is called inside belongs to that step's plan."""

    active = False


_STEP = _ThreadStep()


class Run:
    """A plan at work on a model; `remove()` (or leaving it as a context) takes it off again.

    For a plan of region "model" every call of the model with gradients on runs under the plan. For a plan of region
    "step" the user marks the region: `with run.step(): loss = forward()`; the backward pass follows outside.
    """

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        engine: CopyEngine,
        on_mismatch: OnMismatch,
        measure_every: int = MEASURE_EVERY,
        on_overrun: Callable[[Overrun], bool] | None = None,
    ) -> None:
        self.plan = plan
        self._model = weakref.ref(model)
        self._engine, self._on_mismatch = engine, on_mismatch
        self._device = model_device(model)
        self._table = ActionTable.of(plan)
        self._stats = RunStats()
        self._inside = threading.local()
        self._warn_once = WarnOnce()
        self._watch = RunWatch(plan, model, self._device, self._warn_once, measure_every, on_overrun)
        self._removed = self._paused = self._begun = False
        engine.open_arena(self._table.host_bytes).close()  # a tier that cannot be had is told now, not in mid-step
        outside = None if self._table.does_nothing else self._warn_outside
        self._attachment = Attachment(model, self._region if plan.region == "model" else self._unmarked, outside)

    @property
    def model(self) -> torch.nn.Module:
        """The model that the plan is on; whoever trains it holds it, the run does not.

        Raises:
            UsageError: it is gone.
        """
        model = self._model()
        if model is None:
            raise UsageError("the model of this plan is gone: keep it as long as its run")
        return model

    @property
    def stats(self) -> RunStats:
        """Counts of the last step that was begun."""
        if accelerators.has_streams(self._device):
            self._stats.peak_bytes = accelerators.peak_allocated_bytes(self._device)
            self._stats.reserved_bytes = accelerators.peak_reserved_bytes(self._device)
        return self._stats

    @property
    def totals(self) -> RunTotals:
        """Counts over all steps so far."""
        return self._watch.totals

    @contextmanager
    def _unmarked(self) -> Iterator[None]:
        """A call of the model under a plan of region "step", which does nothing unless the user marks the region."""
        if not self._is_idle():
            self._warn_outside("")
        yield

    def _warn_outside(self, part: str) -> None:
        """The model, or a part of it, runs where the plan does nothing: say so, once."""
        if self._is_idle():
            return
        if self.plan.region == "step":
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
        """Nothing is to be said of what runs now: it is paused, marked, or no training."""
        return self._paused or getattr(self._inside, "entered", False) or not torch.is_grad_enabled()

    @contextmanager
    def step(self) -> Iterator[RunStats]:
        """The region that a plan of region "step" covers: the forward pass up to the loss.

        Raises:
            UsageError: the plan covers the calls of the model, or it was taken off, or the model was compiled since.
        """
        if self.plan.region != "step":
            raise UsageError("this plan covers calls of the model by itself: plan with region='step' to use run.step()")
        if self._removed:
            raise UsageError("this plan was taken off the model: apply it again")
        self._inside.entered = True
        try:
            with self._region():
                yield self._stats
        finally:
            self._inside.entered = False

    def forward_region(self) -> AbstractContextManager[object]:
        """`step()`, or nothing where the plan covers calls of the model: for a loop that takes plans of any region."""
        return self.step() if self.plan.region == "step" else nullcontext()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Plain training inside, with the plan still attached; for comparing the two in turns."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    @contextmanager
    def _region(self) -> Iterator[None]:
        if self._paused or _STEP.active or not torch.is_grad_enabled() or self._bypassed():
            yield
            return
        if accelerators.has_streams(self._device):
            accelerators.reset_peaks(self._device)
        self._begun = True
        self._stats = RunStats(peak_bytes=self._stats.peak_bytes, reserved_bytes=self._stats.reserved_bytes)
        self._watch.begin(self._stats)
        if self._table.does_nothing:
            with self._keeping() if self._watch.is_measuring else nullcontext():
                yield
            return
        _refuse_capture()
        self._attachment.refuse_compiled()
        _STEP.active = True
        try:
            with self._planned_step():
                yield
        finally:
            _STEP.active = False

    def _bypassed(self) -> bool:
        """Whether saved tensors are out of our sight, as in a transform; tracing a graph is no training either."""
        if torch._C._get_tracing_state() is not None or torch.compiler.is_exporting():
            return True
        seen = torch._C._functorch.peek_interpreter_stack() is None and _hooks_are_allowed()
        if not seen and not self._table.does_nothing:
            self._warn_once(
                "bypassed",
                "the step runs in a torch.func transform, or with saved tensor hooks disabled, so it goes without the "
                "plan and keeps its activations: use loss.backward(), or have memory for a plain step",
            )
        return not seen

    def _new_step(self) -> PlannedStep:
        arena = self._engine.open_arena(self._table.host_bytes)
        self._stats.device_clock = arena.clock
        actions = StepActions(self._table, arena, self._device, self._stats, self._warn_once)
        return PlannedStep(actions, self._on_mismatch)

    @contextmanager
    def _planned_step(self) -> Iterator[None]:
        step = self._new_step()
        with self._watch.following(step):
            with _watching(step) if self._table.emptied else _recognising(step):
                yield
            step.end_forward()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """A measured step of a plan that does nothing: its hooks keep everything, and tell of the backward pass."""
        step = self._new_step()
        step.on_path = False
        with self._watch.following(step), torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack):
            yield

    @contextmanager
    def measured(self) -> Iterator[RunStats]:
        """Measure the peak of what runs inside (forward and backward) at the allocator, into `stats.peak_bytes`.

        Needed on the CPU only, whose allocator keeps no counters; it slows the step down a little.
        """
        with self._watch.measured_outside() as tell_peak:
            with MemoryMeter(self._device) as meter:
                yield self._stats
            self._stats.peak_bytes, self._stats.reserved_bytes = meter.peak_bytes, meter.reserved_bytes
            self._stats.rounding_bytes = meter.rounding_bytes
            tell_peak(meter.peak_bytes)

    def snapshot(self) -> StepSnapshot:
        """What the next step may change, kept aside so that the step can be repeated; `close` it afterwards.

        Raises:
            TierError: gradients accumulate, and the tier cannot take them.
        """
        return StepSnapshot(self.model, self._engine, self._device)

    def remove(self) -> None:
        """Take the plan off the model; steps under way end as they began."""
        if self._removed:
            return
        self._removed = True
        self._watch.close()
        self._tell_if_unused()
        self._attachment.remove()
        self._engine.close()

    def _tell_if_unused(self) -> None:
        """What trains past the plan shows nothing of itself (`model.compile()`, say), but it leaves new parameters."""
        if not self._begun and not self._table.does_nothing and self._attachment.was_trained():
            self._warn_once(
                "outside",
                "the model was trained and the plan was never used: call model(...) (or use `with run.step():` under a "
                "plan of region 'step') as it was when the plan was applied, without torch.compile",
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


_hooks_are_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def _refuse_capture() -> None:
    """What the host does between ops (hooks, replays, waits) would be missing when a graph is played again."""
    if cuda_only.is_capturing():
        raise UsageError(
            "a planned step cannot be captured into a CUDA graph: capture without the plan, or train without the graph"
        )


@contextmanager
def _recognising(step: PlannedStep) -> Iterator[None]:
    """The step sees every op, and what autograd saves and reads."""
    with torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack), StepMode(step):
        yield


@contextmanager
def _watching(step: PlannedStep) -> Iterator[None]:
    """The step sees every look at a tensor besides, and has everything in place when nobody watches any more."""
    hooks = torch.autograd.graph.saved_tensors_hooks(step.quietly(step.pack), step.quietly(step.unpack))
    with hooks, RawLooks(step.look), WatchfulMode(step):
        try:
            yield
        finally:
            step.restore()


def apply_plan(
    plan: Plan,
    model: torch.nn.Module,
    *,
    on_mismatch: OnMismatch = "warn",
    spill_directory: str | Path | None = None,
    check_copies: bool = True,
    measure_every: int | None = MEASURE_EVERY,
    on_overrun: Callable[[Overrun], bool] | None = None,
) -> Run:
    """Attach a plan to a model.

    Args:
        plan: made for this model.
        model: in the state (training mode, shapes) in which it was profiled.
        on_mismatch: what to do when a step leaves the profiled path: "warn" once and keep what is left, or "error".
        spill_directory: where the CPU engine's spill file lies.
        check_copies: compare checksums of what comes back from the spill file with those of what was written.
        measure_every: on a CPU, measure the peak of the steps 1, 2, 10, 100 and of each so manieth; None or 0: of none.
        on_overrun: is given each measured peak over the budget, and says whether it takes care of it; None: it is told.

    Raises:
        UsageError: the model is compiled, or under a plan already.
        PlanMismatch: the plan was made for another model or device, or replays what the device may not repeat.
        InvalidSchedule: the plan was changed so that it cannot be executed.
        TierError: the swap tier cannot be set up.
    """
    if on_mismatch not in ("warn", "error"):
        raise UsageError(f"on_mismatch={on_mismatch!r}: choose 'warn' or 'error'")
    if measure_every is not None and (not isinstance(measure_every, int) or measure_every < 0):
        raise UsageError(f"measure_every={measure_every!r}: give a number of steps, or None to measure none")
    if not isinstance(model, torch.nn.Module):
        raise PoochError(f"apply() takes a torch.nn.Module, not {type(model).__name__}")
    refuse_taken(model)
    device = model_device(model)
    if plan.model_signature != model_signature(model):
        raise PlanMismatch(
            f"the plan was made for another model ({plan.workload}): its parameters or buffers differ in name, shape "
            f"or "
            "dtype; profile this model and plan again"
        )
    if plan.device_kind != device.type:
        raise PlanMismatch(f"the plan was made for {plan.device_kind}, the model is on {device.type}: profile it there")
    check_executable(plan)
    refuse_unrepeatable(plan, device)
    engine = make_engine(device, spill_directory, check_copies=check_copies)
    try:
        return Run(plan, model, engine, on_mismatch, measure_every or 0, on_overrun)
    except PoochError:
        engine.close()
        raise
