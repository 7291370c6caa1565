"""Training that goes on when memory runs out: plan again for fewer bytes, and repeat the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..ground.errors import InfeasibleBudget, UsageError
from ..ground.units import format_bytes, plural
from ..ground.visible import one_line
from ..ir import Plan, Profile, Region
from ..ir.arguments import plan_of, profile_of
from .budgets import is_smallest
from .options import plan_options
from .planning import plan_with
from .planning_aside import is_worthwhile
from .profiling import profile as make_profile
from .smallest import budget_in_bytes

if TYPE_CHECKING:
    import torch

    from ..executor import Run
    from ..executor.causes import Overrun
    from ..executor.status import Status

MOST_REPAIRS = 8  # of one step
MOST_TIGHTENED = 4  # plans made because of a measured peak, each of which takes the planning time
UNKNOWN_SHARE = 0.05  # of the plan's peak: taken to be missing if the error does not say how much is
Replan = Callable[[int], Plan]
_USE = "pooch.guard(profile, budget, model)"
Reason = Literal["out of memory", "peak over the budget", "another path"]


@dataclass(frozen=True, slots=True)
class Repair:
    """A plan that was replaced.

    Attributes:
        step: number of the step, counted from 1.
        reason: why the plan was replaced.
        missing_bytes: by how much the old plan was taken to be too large (0 for another path).
        predicted_peak_bytes: of the new plan.
    """

    step: int
    reason: Reason
    missing_bytes: int
    predicted_peak_bytes: int


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


class Guard:
    """A plan that is applied to a model, and replaced when it turns out too large. Made by `guard`; a context manager.

    Attributes:
        plan: the current plan.
        run: what executes it (`guard.run.stats`).
        repairs: the plans that were replaced so far, in order.
    """

    def __init__(
        self,
        plan: Plan,
        model: torch.nn.Module,
        replan: Replan,
        *,
        reprofile: Callable[[Callable[[], torch.Tensor]], tuple[Plan, Replan]] | None = None,
        measured_steps: int = 1,
        replan_after: int | None = None,
        watch_peak: bool = True,
        tell: Callable[[str], None] = _warn,
        **apply_options: Any,
    ) -> None:
        from ..executor.engines.pinned import blocks_kept

        self.plan, self.model = plan, model
        self.repairs: list[Repair] = []
        self._replan, self._reprofile, self._tell = replan, reprofile, tell
        self._measured_steps, self._replan_after = measured_steps, replan_after
        self._apply_options = apply_options if measured_steps else {"measure_every": 0, **apply_options}
        self._steps = self._steps_off_path = 0
        self._watch_peak, self._tightened, self._ran_out = watch_peak, 0, 0
        self._overrun: Overrun | None = None
        self._kept = ExitStack()
        self._kept.enter_context(blocks_kept())  # the next plan reuses page-locked memory of this one
        self._apply(plan)

    def _apply(self, plan: Plan) -> None:
        from ..executor import apply_plan

        self.plan = plan
        self.run: Run = apply_plan(plan, self.model, on_overrun=self._take, **self._apply_options)
        self._to_measure = self._measured_steps

    def _apply_again(self, plan: Plan) -> None:
        """Apply a plan of the current profile, also if layers were frozen or unfrozen since."""
        from ..torchtools.tensors import model_signature

        self._apply(replace(plan, model_signature=model_signature(self.model)))

    def _take(self, overrun: Overrun) -> bool:
        """Whether this guard deals with a peak over the budget; otherwise the run warns about it.

        Rounding by the allocator, checksums, a step off the path and a peak that tighter plans did not lower lead to no
        new plan.
        """
        if not self._watch_peak:
            return True  # the caller measures the peak
        if not overrun.is_of_tensors or overrun.is_off_path or self._tightened == MOST_TIGHTENED:
            return False
        self._overrun = overrun
        return True

    def step(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run one forward and backward pass and return the detached loss; call the optimizer afterwards, as usual.

        If memory runs out in an op of the forward pass, what can leave does, the op runs again, and the next step has a
        tighter plan. Where that is not enough, the guard restores gradients, buffers and random states, plans again for
        as many bytes less as were missing (twice as many each time in a row), and repeats the pass. If a measured peak
        exceeds the budget by more than the allocator's rounding and checksums, the next step has a tighter plan; after
        four such plans, the guard only warns.

        Args:
            forward: () -> loss, on this step's batch; called again if the step is repeated.

        Raises:
            InfeasibleBudget: memory ran out, and there is no tighter plan.
        """
        self._steps += 1
        snapshot = self.run.snapshot()
        try:
            loss = self._until_it_fits(forward, snapshot.restore)
        finally:
            snapshot.close()
        self._look_at_the_memory()
        self._look_at_the_peak()
        self._look_at_the_path(forward)
        return loss

    def _until_it_fits(self, forward: Callable[[], torch.Tensor], restore: Callable[[], None]) -> torch.Tensor:
        from ..torchtools.device_memory import give_memory_back
        from ..torchtools.out_of_memory import missing_bytes
        from ..torchtools.training_state import model_device

        for repeats in range(MOST_REPAIRS + 1):
            done = self._attempt(forward)
            if not isinstance(done, BaseException):
                return done
            if repeats == MOST_REPAIRS:
                raise done
            restore()
            give_memory_back(model_device(self.model))
            missing = missing_bytes(done) or int(UNKNOWN_SHARE * self.plan.predicted_peak_bytes)
            self._tighten("out of memory", missing << repeats)
        raise AssertionError("unreachable: the last round returns or raises")

    def _attempt(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor | BaseException:
        """The loss, or the out-of-memory error without the frames that keep the failed step alive."""
        from ..torchtools.out_of_memory import forgotten, is_out_of_memory

        try:
            with self.run.measured() if self._to_measure > 0 else nullcontext():
                with self.run.forward_region():
                    loss = forward()
                loss.backward()
            return loss.detach()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return forgotten(error)

    def _tighten(self, reason: Reason, missing_bytes: int, cause: str = "") -> None:
        target_bytes = self.plan.predicted_peak_bytes - missing_bytes
        self._tell(
            f"{reason} in step {self._steps}, {format_bytes(missing_bytes)} are missing{cause and f' ({cause})'}: "
            f"planning again for {format_bytes(max(0, target_bytes))}"
        )
        try:
            tighter = self._replan(max(1, target_bytes))
        except InfeasibleBudget as error:
            if error.minimum_bytes >= self.plan.predicted_peak_bytes:
                raise
            tighter = self._replan(error.minimum_bytes)
        self._replace(tighter, reason, missing_bytes)

    def _replace(self, plan: Plan, reason: Reason, missing_bytes: int) -> None:
        self.run.remove()
        self._apply_again(plan)
        self.repairs.append(Repair(self._steps, reason, missing_bytes, plan.predicted_peak_bytes))

    def _look_at_the_memory(self) -> None:
        """Plan again if memory ran out in an op that ran once more; the step itself is right and is not repeated."""
        asked_bytes = self.run.stats.ran_out_bytes
        if not asked_bytes or self._ran_out == MOST_REPAIRS:
            return
        missing = asked_bytes if asked_bytes > 1 else int(UNKNOWN_SHARE * self.plan.predicted_peak_bytes)
        try:
            self._tighten("out of memory", missing << self._ran_out)
            self._ran_out += 1
        except InfeasibleBudget as error:
            self._ran_out = MOST_REPAIRS
            self._tell(f"memory ran out in step {self._steps}, and a tighter plan does not help: {error}")

    def _look_at_the_peak(self) -> None:
        """Plan again if the peak was over the budget; the step itself is right and is not repeated."""
        self._to_measure = max(0, self._to_measure - 1)
        overrun, self._overrun = self._overrun, None
        if overrun is None:
            return
        try:
            self._tighten("peak over the budget", overrun.excess_bytes, overrun.cause.text)
        except InfeasibleBudget as error:
            self._tightened = MOST_TIGHTENED  # no plan helps
            self._tell(f"{overrun.text}; a tighter plan does not help: {error}")
            return
        self._tightened += 1
        if self._tightened == MOST_TIGHTENED:
            self._tell(f"planned again {MOST_TIGHTENED} times for measured peaks: from now on they are only reported")

    def _look_at_the_path(self, forward: Callable[[], torch.Tensor]) -> None:
        self._steps_off_path = self._steps_off_path + 1 if self.run.stats.mismatches else 0
        if self._replan_after is None or self._steps_off_path < self._replan_after:
            return
        try:
            self.plan_again(forward)
        except InfeasibleBudget as error:
            self._replan_after = None  # the step is right without a new plan, so do not profile it each time
            self._tell(f"the new path keeps the old plan: {error}")

    def plan_again(self, forward: Callable[[], torch.Tensor]) -> Plan:
        """Profile the step as it is now (other shapes, another branch) and plan it under the same budget.

        Args:
            forward: () -> loss. It is called several times; the training state does not change.

        Raises:
            InfeasibleBudget: no plan fits; the old one stays.
        """
        if self._reprofile is None:
            raise UsageError("this guard cannot profile the step: make it with pooch.guard()")
        self._steps_off_path = 0
        self.run.remove()
        try:
            plan, self._replan = self._reprofile(forward)
        except BaseException:
            self._apply_again(self.plan)
            raise
        self._tightened = 0
        self._replace(plan, "another path", 0)
        return plan

    def status(self) -> Status:
        """How the last step ran, for a progress bar or a log, see `Run.status`. Its steps are those of the guard."""
        return replace(self.run.status(), steps=self._steps)

    def __repr__(self) -> str:
        repairs = f", {plural(len(self.repairs), 'repair')}" if self.repairs else ""
        budget = f", budget {format_bytes(self.plan.budget_bytes)}" if self.plan.budget_bytes else ""
        return f"Guard({one_line(self.plan.workload) or 'a step'}{budget}, {plural(self._steps, 'step')}{repairs})"

    def remove(self) -> None:
        """Detach the plan from the model."""
        self.run.remove()
        self._kept.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def guard(
    profile: Profile | str | Path,
    budget: float | str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    plan: Plan | str | Path | None = None,
    region: Region = "step",
    planning: Mapping[str, Any] | None = None,
    measured_steps: int = 1,
    replan_after: int | None = None,
    **apply_options: Any,
) -> Guard:
    """Attach a plan that repairs itself: `with pooch.guard(...) as guard: loss = guard.step(forward)`.

    Args:
        profile: the measured step, or the path of a saved profile.
        budget: as `plan` takes it.
        model: the model that was profiled.
        optimizer: that was profiled; only needed to profile again.
        plan: to begin with, or the path of a saved plan. None: one is made.
        region: of the plan that is made.
        planning: further arguments of `plan` (policy, host_budget, time_limit_s, ...), for every plan that is made.
        measured_steps: how many of the first steps under each plan have their peak measured; later steps are measured
            at intervals (`measure_every` of `apply`). 0: no step is. On a GPU all steps are, at no cost.
        replan_after: number of steps in a row that left the profiled path after which the step is profiled and planned
            again. None: only when `guard.plan_again(forward)` is called.
        **apply_options: of `apply`.

    Raises:
        InfeasibleBudget: no plan fits.
        UsageError: an argument is of the wrong kind, the plan is for several microbatches in flight, or the model's
            ranks run collectives, which one rank cannot repeat alone.
    """
    import torch

    from ..torchtools.ranks import has_collectives, rank_count

    measured_step = profile_of(profile, "guard")
    plan = None if plan is None else plan_of(plan, "guard")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"guard() takes a torch.nn.Module, not {type(model).__name__}: {_USE}")
    if has_collectives(model) and rank_count() > 1:
        raise UsageError(
            "a guard repeats a step in one rank alone, and its collectives would meet those of other steps in other "
            "ranks: use pooch.auto(model, budget), which repeats nothing"
        )
    if replan_after is not None and replan_after < 1:
        raise UsageError(f"replan_after={replan_after}: give at least 1 step, or None")
    planning = dict(planning or {})
    telling = {name: planning.pop(name) for name in ("known", "progress") if name in planning}
    options = plan_options(region=plan.region if plan is not None else region, **planning)
    if max(options.microbatches_in_flight, plan.microbatches_in_flight if plan is not None else 1) > 1:
        raise UsageError("a guard repeats one step, not several microbatches in flight: use pooch.apply(plan, model)")

    def replan_of(measured: Profile, budget_bytes: int) -> Replan:
        def replan(target_bytes: int) -> Plan:
            made = plan_with(measured, target_bytes, options, **telling, aside=is_worthwhile(measured))
            return replace(made, budget_bytes=budget_bytes)

        return replan

    def reprofile(forward: Callable[[], torch.Tensor]) -> tuple[Plan, Replan]:
        measured = make_profile(forward, model, optimizer, workload=measured_step.workload)
        known_bytes = budget_in_bytes(measured, budget, options) if is_smallest(budget) else budget_bytes
        replan = replan_of(measured, known_bytes)
        return replan(known_bytes), replan

    budget_bytes = budget_in_bytes(measured_step, budget, options)
    replan = replan_of(measured_step, budget_bytes)
    return Guard(
        plan if plan is not None else replan(budget_bytes),
        model,
        replan,
        reprofile=reprofile,
        measured_steps=measured_steps,
        replan_after=replan_after,
        **apply_options,
    )
