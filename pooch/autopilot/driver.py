"""Drives the steps under a budget: where they begin and end, and how each of them runs."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..errors import TierError, UsageError
from ..executor.online import Evictor, LiveBytes
from ..executor.statistics import RunStats
from ..profiler.live import is_profiling, needs_profiler
from ..torchtools.ranks import will_arrange_buckets
from ..torchtools.threads import OwnThread, is_alone
from .backward import BackwardWatch
from .budget import HeldBudget
from .counting import margin_bytes
from .governed import GovernedModels
from .known import Known
from .library import MOST_FAILURES, Library
from .remarks import BY_OTHER_HOOKS, MORE_THAN_RECORDED, NOTHING_LEFT, Remarks
from .running import RunningStep
from .signature import StepKey, step_key
from .stacks import can_outlast_the_call, has_own_hooks, is_ordinary_call
from .standstill import Standstill
from .steps import FollowingStep, InCoreStep, RecordedStep, Step, UnplannedStep
from .summary import Counters, Decision, counted

MOST_FORWARDS = 64  # calls without a backward pass after which a step is taken to be over
TIGHT_SHARE = 0.7  # of the budget: a step that is known to take more is watched, though it fits
_MOST_UNSETTLED_STEPS = 64  # a wrapper that has not arranged its buckets by then never will, as under `no_sync` alone
_RECOUNTED_STEPS = (1, 2, 3, 10, 100)


class _Here(threading.local):
    """What the calling thread does.

    Attributes:
        depth: Number of calls of governed modules that it is within.
        is_beside: Whether the last outermost one is beside a step of another thread.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.is_beside = False


class StepDriver:
    """Runs each step of some models within a budget. The models keep it alive.

    A step begins with the outermost call of a governed module, and ends with the backward pass. There is one at a time:
    what other threads compute meanwhile runs as ever, though what it allocates may have values of the step leave.

    Args:
        governed: The models.
        budget: The budget.
        live: Counts live bytes.
        evictor: Holds the budget. Closed by `remove`.
        library: Knows how to run each kind of step. Closed by `remove`.
        remarks: Tells the user.

    Attributes:
        counters: What happened so far.

    Raises:
        UsageError: If a budget is held on the device already.
    """

    def __init__(
        self,
        governed: GovernedModels,
        budget: HeldBudget,
        live: LiveBytes,
        evictor: Evictor,
        library: Library,
        remarks: Remarks,
    ) -> None:
        self.governed, self.budget, self.evictor, self.library = governed, budget, evictor, library
        self._live = live
        self.counters = Counters()
        self._remarks = remarks
        self._running: RunningStep | None = None  # of the thread that `_claimed` names, and changed by it alone
        self._claimed: OwnThread | None = None
        self._claiming = threading.Lock()
        self._here = _Here()
        self._is_removed = False
        governed.place(self._call)
        self._backward = BackwardWatch(self._backward_begins, self._backward_ended)
        self._backward.start()
        self._standstill = Standstill()
        self._standstill.begin()
        self._closed = weakref.finalize(self, _close, self._standstill, self._backward, library, evictor)
        self._closed.atexit = False
        _ACTIVE[governed.device.type] = self

    def add(self, model: torch.nn.Module) -> None:
        """Govern a further model too."""
        if self.governed.add(model, self._call) and self._running is not None:
            self._running.is_whole = False

    def is_within_call(self) -> bool:
        """Whether the calling thread is within a governed call."""
        return self._here.depth > 0

    # Calls ------------------------------------------------------------------------------------------------------------

    def region(self) -> AbstractContextManager[None]:
        """Return a context that counts as a call of a governed module."""
        return self._call(-1, (), {})

    @contextmanager
    def _call(self, number: int, args: Any, kwargs: Any) -> Iterator[None]:
        """Surround one call of a governed module."""
        here, depth = self._here, self._here.depth
        begins = depth == 0 and self._begins(number, args, kwargs)
        if depth == 0 and not begins and not here.is_beside:
            yield
            return
        here.depth = depth + 1
        try:
            with self._running.step.around_call() if begins and self._running else nullcontext():
                yield
        except BaseException:
            if begins:
                self._abandon()
            raise
        finally:
            here.depth = depth
        if begins:
            self._call_ended()

    def _begins(self, number: int, args: Any, kwargs: Any) -> bool:
        """Whether an outermost call belongs to a step, which begins now if none is running."""
        self._here.is_beside = False
        if self._is_removed or BackwardWatch.is_running() or not is_ordinary_call():
            return False
        self._standstill.pass_by(is_in_step=True)
        if self._claim() and self._running is not None and self._running.is_over(MOST_FORWARDS):
            self._end(is_complete=False)
        if not self._claim():
            self._here.is_beside = True  # another thread trains under the budget
            self.evictor.rest()
            return False
        if self._running is None:
            try:
                with torch._C.DisableTorchFunction():
                    self._begin(number, args, kwargs)
            finally:
                self._claimed = None if self._running is None else self._running.thread
        assert self._running is not None
        self._running.calls += 1
        self._look_at_calls(self._running)
        return True

    def _claim(self) -> bool:
        """Whether the calling thread alone may begin and end steps: it has one, or no thread that is alive has."""
        with self._claiming:
            if self._claimed is None or self._claimed.has_ended:
                self._claimed = OwnThread()
            return self._claimed.is_here

    def _look_at_calls(self, running: RunningStep) -> None:
        """Hold the budget from here on if a step that fits turns out to call more than the recorded one."""
        if running.decision == "in-core" and 0 < running.known.calls < running.calls and can_outlast_the_call():
            self._go_online(running)

    def _begin(self, number: int, args: Any, kwargs: Any) -> None:
        # PyTorch ends the process if one thread reads `parameter.grad` of a model that another one is training.
        models = self.governed.living if is_alone() else self.governed.called(number)
        parameters = [parameter for model in models for parameter in model.parameters()]
        key = step_key(number, args, kwargs, models, parameters)
        self._look_between()
        # Counting looks at all tensors, and PyTorch ends the process if another thread is just releasing one of them.
        if self.counters.steps + 1 in _RECOUNTED_STEPS and is_alone():
            self._live.recount()
            self.budget.hold()
        stats = RunStats()
        start_bytes = self._live.now()
        settled = self.counters.steps >= _MOST_UNSETTLED_STEPS or not any(map(will_arrange_buckets, models))
        decision, known = self.library.choose(key, start_bytes, self.budget.size_bytes, is_settled=settled)
        outlasts = can_outlast_the_call()
        if decision == "record" and (not outlasts or (is_profiling() and needs_profiler(self.governed.device))):
            self.library.not_recorded(key, known)
            decision = known.decision = "online"
        if has_own_hooks():  # only the innermost hooks are asked, and the program's may change what is kept
            decision = known.decision = "in-core"
            known.reason = "the program has saved tensor hooks of its own around it"
        self.evictor.begin_step(stats)
        self.evictor.verification.begin_step(models)
        self.budget.step_begins()
        try:
            step = self._new_step(key, decision, known, models, start_bytes)
        except TierError as error:
            if decision != "plan":
                raise
            decision, known.reason = "online", str(error)  # there is no room for all that the plan swaps
            step = self._new_step(key, decision, known, models, start_bytes)
        self._running = RunningStep(key, decision, known, step, stats, outlasts)

    def _new_step(
        self, key: StepKey, decision: Decision, known: Known, models: list[torch.nn.Module], start_bytes: int
    ) -> Step:
        match decision:
            case "in-core":
                if self._is_tight(known, start_bytes):
                    return UnplannedStep(self.evictor, replays=False, copies_ahead=False)
                return InCoreStep()
            case "plan":
                assert known.plan is not None
                return FollowingStep(self.evictor, known.plan, known)
            case "record":
                return RecordedStep(self.evictor, models, start_bytes, self.governed.name)
            case _:  # where allocations do not ask for room, it is made before each op
                return UnplannedStep(self.evictor, replays=not self._live.asks or self.library.replays(key))

    def _is_tight(self, known: Known, start_bytes: int) -> bool:
        """Whether a step that fits might pass the budget if it did somewhat more than the one that was recorded.

        Its saved tensors can leave then. Where allocations do not ask for room, nothing would make it in time.
        """
        budget_bytes = self.budget.size_bytes
        if known.profile is None or budget_bytes is None or not self._live.asks or has_own_hooks():
            return False
        expected_bytes = known.profile.peak_bytes + start_bytes - known.profile.persistent_bytes
        return expected_bytes > TIGHT_SHARE * budget_bytes

    def _call_ended(self) -> None:
        """Take hooks and modes away with the call where they cannot stay until the backward pass."""
        running = self._running
        if running is not None and running.is_of_this_thread and not running.outlasts:
            running.close_forward()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what could not be raised in the middle of an op, such as Ctrl-C, and end the step that is running."""
        try:
            self._live.raise_failure()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """End a step that failed."""
        if self._running is not None and self._running.is_of_this_thread:
            self._end(is_complete=False)

    # The backward pass ------------------------------------------------------------------------------------------------

    def _backward_begins(self, builds_graph: bool) -> None:
        self._standstill.pass_by(is_in_step=True)
        self._raise_failure()
        running = self._running
        if running is None or not running.is_of_this_thread:
            if self._here.is_beside:  # it is that of the thread's own calls, which are not governed
                return
            self.evictor.hold()
            if running is not None:
                running.is_read_elsewhere = True
        elif builds_graph and running.is_open and running.outlasts:
            self._go_online(running)  # what this backward pass saves is read by the next one
        else:
            running.close_forward()

    def _backward_ended(self, is_complete: bool, builds_graph: bool) -> None:
        running = self._running
        if running is None or not running.is_of_this_thread:
            self._here.is_beside = False
            return
        if not (builds_graph and running.is_open):
            self._end(is_complete)
            self._standstill.pass_by(is_in_step=False)
        if is_complete:  # else its own error goes first
            self._raise_failure()

    def _go_online(self, running: RunningStep) -> None:
        """Go on under the online policy, unless the step is under it already."""
        if running.decision == "online" or isinstance(running.step, UnplannedStep):
            running.decision = "online"
            return
        running.step.close_forward()
        running.step.end(is_complete=False)
        if running.decision == "record":
            self.library.cannot_record(running.key, running.known)
        running.decision = "online"
        running.step = UnplannedStep(self.evictor)

    def _end(self, is_complete: bool) -> None:
        running, self._running = self._running, None
        assert running is not None
        try:
            self._end_of(running, is_complete)
        finally:
            self._claimed = None

    def _end_of(self, running: RunningStep, is_complete: bool) -> None:
        running.close_forward()
        step_ms, peak_bytes = running.elapsed_ms, self._live.peak()
        profile = running.step.end(is_complete and running.is_whole)
        if profile is not None:
            self.library.recorded(running.key, running.known, profile, running.calls)
            self._remarks.margin(margin_bytes(self._live, profile))
            self.budget.step_was_recorded(profile.peak_bytes)
        elif running.decision == "record":
            self.library.not_recorded(running.key, running.known)
        if isinstance(running.step, UnplannedStep) and running.step.replays:
            if self.evictor.missing_bytes:
                self.library.is_leaner_copied(running.key)
            elif running.step.is_faster_copied:
                self.library.is_faster_copied(running.key)
        self._count(running, step_ms, peak_bytes)
        self.library.banned(running.known, self.evictor.verification.take_new())
        self._live.reset_peak()

    def _count(self, running: RunningStep, step_ms: float, peak_bytes: int) -> None:
        left, known, budget_bytes = running.step.left_plan, running.known, self.budget.size_bytes
        if running.decision == "plan":
            known.left_plan = known.left_plan + 1 if left else 0
        is_slower = running.decision in ("plan", "online") and known.profile is not None
        lost_ms = step_ms - known.profile.step_ms if is_slower and known.profile is not None else 0.0
        step = counted(running.decision, left, running.stats, peak_bytes, lost_ms, budget_bytes)
        self.counters = self.counters.with_step(step)
        if budget_bytes is not None and step.steps_over_budget:
            self._remarks.over_budget(peak_bytes, budget_bytes, self._why_over_budget(running))

    def _why_over_budget(self, running: RunningStep) -> str:
        if running.decision != "in-core":
            return NOTHING_LEFT
        if running.known.profile is None:
            return BY_OTHER_HOOKS
        running.known.left_plan = MOST_FAILURES  # so that its next step is recorded again
        return MORE_THAN_RECORDED

    def _look_between(self) -> None:
        """Take the peak since the last backward pass into account."""
        between_bytes = max(self.counters.between_peak_bytes, self._live.peak())
        self.counters = replace(self.counters, between_peak_bytes=between_bytes)

    def remove(self) -> None:
        """Hold the budget no longer. A step that is running ends under it.

        Raises:
            UsageError: If a step is running in another thread, which alone can end it.
        """
        if self._is_removed:
            return
        if not self._claim():
            raise UsageError("a step is running in another thread: call remove() there, or after its backward pass")
        self._is_removed = True
        if self._running is not None:
            self._end(is_complete=False)
        self._claimed = None
        self._look_between()
        self.budget.stop()
        self.governed.remove()
        self._closed()
        self.library.join()
        if _ACTIVE.get(self.governed.device.type) is self:
            del _ACTIVE[self.governed.device.type]

    def leave_alone(self) -> None:
        """In a forked child, such as a worker that loads data: hold nothing. The threads of its parent are not here."""
        self._is_removed = True
        if self._running is not None:
            self._running.close_forward()
            self._running = None
        self._live.ask(False)
        self._live.let_go()


_ACTIVE: weakref.WeakValueDictionary[str, StepDriver] = weakref.WeakValueDictionary()


def refuse_a_second(device: torch.device) -> None:
    """Refuse to hold two budgets on one device.

    Raises:
        UsageError: If one is held.
    """
    if device.type in _ACTIVE:
        raise UsageError(
            f"a budget is held on {device.type} already: give all models in one list, as in "
            "pooch.auto([generator, discriminator], ...), or call remove() on the other first"
        )


def _leave_child_alone() -> None:
    for held in list(_ACTIVE.values()):
        held.leave_alone()
    _ACTIVE.clear()


os.register_at_fork(after_in_child=_leave_child_alone)


def _close(standstill: Standstill, backward: BackwardWatch, library: Library, evictor: Evictor) -> None:
    """Undo what a budget has put in place. It must not hold the driver, whose end may call it."""
    standstill.end()
    backward.stop()
    library.close()
    evictor.close()
