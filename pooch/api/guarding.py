"""Training that goes on when memory runs out all the same: the plan is made again, tighter, and the step repeated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pooch.api.planning import budget_in_bytes
from pooch.api.planning import plan as make_plan
from pooch.api.profiling import profile as make_profile
from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Plan, Profile, Region
from pooch.units import format_bytes, is_smallest

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from pooch.executor import Run
    from pooch.executor.causes import Overrun

MOST_REPAIRS = 8
MOST_TIGHTENED = 4  # times for a measured peak, each of which costs the time of planning
UNKNOWN_SHARE = 0.05  # of the plan's peak: what is taken to be missing where an error does not say
Replan = Callable[[int], Plan]
Reason = Literal["out of memory", "peak over the budget", "another path"]


@dataclass(frozen=True, slots=True)
class Repair:
    """One plan that was replaced.

    Attributes:
        step: in which, counted from 1. reason: why.
        missing_bytes: by which the old plan was taken to be too large (0 for another path).
        predicted_peak_bytes: of the new plan.
    """

    step: int
    reason: Reason
    missing_bytes: int
    predicted_peak_bytes: int


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


class Guard:
    """A plan at work on a model, that is made again when it turns out too large. Made by `guard`; also a context.

    Attributes:
        plan: the one in force. run: what executes it (`guard.run.stats`).
        repairs: plans that were replaced so far, in order.
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
        self.plan, self.model = plan, model
        self.repairs: list[Repair] = []
        self._replan, self._reprofile, self._tell = replan, reprofile, tell
        self._measured_steps, self._replan_after = measured_steps, replan_after
        self._apply_options = apply_options if measured_steps else {"measure_every": 0, **apply_options}
        self._steps = self._steps_off_path = 0
        self._watch_peak, self._tightened = watch_peak, 0
        self._overrun: Overrun | None = None
        self._kept = ExitStack()
        self._keep_host_memory()
        self._apply(plan)

    def _keep_host_memory(self) -> None:
        """The next plan takes over what this one has page-locked, where it is enough."""
        from pooch.executor.engines.pinned import blocks_kept

        self._kept.enter_context(blocks_kept())

    def _apply(self, plan: Plan) -> None:
        from pooch.executor import apply_plan

        self.plan = plan
        self.run: Run = apply_plan(plan, self.model, on_overrun=self._take, **self._apply_options)
        self._to_measure = self._measured_steps

    def _apply_again(self, plan: Plan) -> None:
        """Go on under a plan from the profile at hand, also where layers were frozen or unfrozen since."""
        from pooch.torchtools.tensors import model_signature

        self._apply(replace(plan, model_signature=model_signature(self.model)))

    def _take(self, overrun: Overrun) -> bool:
        """A peak over the budget leads to a tighter plan, unless it is the allocator's rounding that is over, the step
        left the path, or tighter plans did not help: then it is only told.
        """
        if not self._watch_peak:
            return True  # whoever made this guard measures by himself
        if overrun.is_rounding or overrun.is_off_path or self._tightened == MOST_TIGHTENED:
            return False
        self._overrun = overrun
        return True

    def step(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One forward and backward pass; returns the loss, detached. Step the optimizer afterwards, as always.

        If memory runs out, gradients, buffers and random states are put back, the plan is made again with what was
        missing taken off (twice as much each time in a row), and the pass is repeated. If a measured peak
        is over the budget, by more than the allocator's rounding, the next step has a tighter plan; after four of these
        such peaks are only told.

        Args:
            forward: () -> loss, on this step's batch; called again where the step is repeated.

        Raises:
            InfeasibleBudget: memory ran out, and there is no tighter plan.
        """
        self._steps += 1
        snapshot = self.run.snapshot()
        try:
            loss = self._until_it_fits(forward, snapshot.restore)
        finally:
            snapshot.close()
        self._look_at_the_peak()
        self._look_at_the_path(forward)
        return loss

    def _until_it_fits(self, forward: Callable[[], torch.Tensor], restore: Callable[[], None]) -> torch.Tensor:
        for repeats in range(MOST_REPAIRS + 1):
            done = self._attempt(forward)
            if not isinstance(done, BaseException):
                return done
            if repeats == MOST_REPAIRS:
                raise done
            restore()
            self._give_memory_back()
            missing_bytes = self._missing_bytes(done) << repeats
            self._tighten("out of memory", missing_bytes)
        raise AssertionError("unreachable: the last round returns or raises")

    def _attempt(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor | BaseException:
        """The loss, or the error that says that memory ran out, without the frames that hold the failed step."""
        from pooch.torchtools.out_of_memory import forgotten, is_out_of_memory

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

    def _missing_bytes(self, error: BaseException) -> int:
        from pooch.torchtools.out_of_memory import missing_bytes

        return missing_bytes(error) or int(UNKNOWN_SHARE * self.plan.predicted_peak_bytes)

    def _give_memory_back(self) -> None:
        from pooch.torchtools.device_memory import give_memory_back
        from pooch.torchtools.training_state import model_device

        give_memory_back(model_device(self.model))

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

    def _look_at_the_peak(self) -> None:
        """The step is done and right, so it is not repeated; the next one gets a tighter plan."""
        self._to_measure = max(0, self._to_measure - 1)
        overrun, self._overrun = self._overrun, None
        if overrun is None:
            return
        try:
            self._tighten("peak over the budget", overrun.excess_bytes, overrun.cause.text)
        except InfeasibleBudget as error:
            self._tightened = MOST_TIGHTENED  # there is nothing more to do about it
            self._tell(f"{overrun.text}; a tighter plan does not help: {error}")
            return
        self._tightened += 1
        if self._tightened == MOST_TIGHTENED:
            self._tell(f"planned again {MOST_TIGHTENED} times for measured peaks: from now on they are only told")

    def _look_at_the_path(self, forward: Callable[[], torch.Tensor]) -> None:
        self._steps_off_path = self._steps_off_path + 1 if self.run.stats.mismatches else 0
        if self._replan_after is None or self._steps_off_path < self._replan_after:
            return
        try:
            self.plan_again(forward)
        except InfeasibleBudget as error:
            self._replan_after = None  # the step is right all the same; it is not measured anew each time
            self._tell(f"the new path keeps the old plan: {error}")

    def plan_again(self, forward: Callable[[], torch.Tensor]) -> Plan:
        """Measure the step as it is now (other shapes, another branch) and plan it under the same budget.

        Args:
            forward: () -> loss. It is run several times; the training state stays as it was.

        Raises:
            InfeasibleBudget: no plan fits; the old one stays.
        """
        if self._reprofile is None:
            raise UsageError("this guard cannot measure the step anew: make it with pooch.guard()")
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

    def remove(self) -> None:
        """Take the plan off the model."""
        self.run.remove()
        self._kept.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def guard(
    profile: Profile,
    budget: int | str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    plan: Plan | None = None,
    region: Region = "step",
    planning: Mapping[str, Any] | None = None,
    measured_steps: int = 1,
    replan_after: int | None = None,
    **apply_options: Any,
) -> Guard:
    """Attach a plan that repairs itself: `with pooch.guard(...) as guard: loss = guard.step(forward)`.

    Args:
        profile: the measured step. budget: as for `plan`.
        model, optimizer: as they were profiled; the optimizer is only needed to profile again.
        plan: to begin with; None: made now.
        region: of the plan, where it is made now.
        planning: further arguments of `plan` (policy, host_budget, time_limit_s, ...), for every plan that is made.
        measured_steps: how many of the first steps under each plan have their peak measured for certain; later ones
            are at intervals (`measure_every` of `apply`); 0: none is. On a GPU all are, at no cost.
        replan_after: after so many steps in a row that left the profiled path, the step is measured anew and planned
            again; None: only when `guard.plan_again(forward)` is called.
        apply_options: of `apply`.

    Raises:
        InfeasibleBudget: no plan fits.
    """
    if replan_after is not None and replan_after < 1:
        raise UsageError(f"replan_after={replan_after}: give at least 1 step, or None")
    region = plan.region if plan is not None else region

    def budget_of(measured: Profile) -> int:
        return budget_in_bytes(measured, budget, region=region, **(planning or {}))

    def replan_of(measured: Profile, budget_bytes: int) -> Replan:
        def replan(target_bytes: int) -> Plan:
            made = make_plan(measured, target_bytes, region=region, **(planning or {}))
            return replace(made, budget_bytes=budget_bytes)

        return replan

    def reprofile(forward: Callable[[], torch.Tensor]) -> tuple[Plan, Replan]:
        measured = make_profile(forward, model, optimizer, workload=profile.workload)
        known_bytes = budget_of(measured) if is_smallest(budget) else budget_bytes
        replan = replan_of(measured, known_bytes)
        return replan(known_bytes), replan

    budget_bytes = budget_of(profile)
    replan = replan_of(profile, budget_bytes)
    return Guard(
        plan if plan is not None else replan(budget_bytes),
        model,
        replan,
        reprofile=reprofile,
        measured_steps=measured_steps,
        replan_after=replan_after,
        **apply_options,
    )
