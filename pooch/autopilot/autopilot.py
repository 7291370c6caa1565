"""`pooch.auto`: any training loop under a budget, from its first step on."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..api.budgets import parse_budget
from ..api.options import PlanOptions
from ..errors import UsageError
from ..executor.engines import make_engine
from ..executor.online import Evictor, live_bytes_of
from ..executor.statistics import RunStats
from ..ir import Plan, Profile
from ..profiler.live import is_profiling
from ..units import format_bytes
from .backward import BackwardWatch
from .budget import budget_of
from .cache import PlanCache
from .governed import GovernedModels
from .library import MOST_FAILURES, Decision, Known, Library
from .optimizers import OptimizerWatch
from .signature import StepKey, step_key
from .stacks import can_outlast_the_call, has_own_hooks, is_ordinary_call
from .steps import FollowingStep, InCoreStep, RecordedStep, Step, UnplannedStep
from .summary import AutoSummary
from .tally import Tally

PLANNING_TIME_LIMIT_S = 10.0
MOST_FORWARDS = 64  # calls without a backward pass after which a step is taken to be over
_RECOUNTED_STEPS = (1, 2, 3, 10, 100)

_ACTIVE: weakref.WeakValueDictionary[str, Auto]


class _Running:
    """The step that is running: what was decided, and what to look at when it ends."""

    def __init__(
        self, key: StepKey, decision: Decision, known: Known, step: Step, stats: RunStats, outlasts: bool
    ) -> None:
        self.key, self.decision, self.known, self.step, self.stats = key, decision, known, step, stats
        self.outlasts = outlasts
        self.begin_s = time.perf_counter()
        self.thread = threading.get_ident()
        self.is_open = True
        self.is_whole = True  # no model was added while it ran, so it can be recorded
        self.is_read_elsewhere = False  # another thread runs a backward pass, perhaps that of this step
        self.calls = 0


class Auto:
    """A budget that is held over every step of some models. Made by `pooch.auto`; also a context manager.

    Attributes:
        budget_bytes: The budget, or None before the first step if it is a share of that step's in-core peak.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        budget: int | str,
        *,
        host_budget: int | str | None = None,
        cache: str | Path | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._governed = GovernedModels(models)
        self._device = self._governed.device
        if self._device.type in _ACTIVE:
            raise UsageError(
                f"a budget is held on {self._device.type} already: give all models in one list, as in "
                "pooch.auto([generator, discriminator], ...), or call remove() on the other first"
            )
        self.budget_bytes, self._share = budget_of(budget)
        self._tell = tell or _announce
        host_bytes = None if host_budget is None else parse_budget(host_budget, None, name="host budget")
        self._live = live_bytes_of(self._device)
        self._evictor = Evictor(self.budget_bytes or 0, make_engine(self._device), self._live, self._device, host_bytes)
        self._library = Library(
            PlanOptions(host_budget=host_bytes, time_limit_s=PLANNING_TIME_LIMIT_S, region="step", explain=False),
            self._tell,
            self._evictor.speed.link,
            cache=None if cache is None else PlanCache(cache, list(models), self._device, budget),
        )
        self._running: _Running | None = None
        self._depth = threading.local()
        self._tally = Tally()
        self._told: set[str] = set()
        self._is_removed = False
        self._governed.place(self._call)
        self._backward = BackwardWatch(self._backward_begins, self._backward_ended)
        self._backward.start()
        self._state: OptimizerWatch | None = None
        if self._share is None:
            self._evictor.set_budget(self.budget_bytes or 0)
        else:
            self._state = OptimizerWatch(self._state_appeared)
        self._closed = weakref.finalize(self, _close, self._backward, self._library, self._evictor)
        self._closed.atexit = False
        _ACTIVE[self._device.type] = self

    def add(self, model: torch.nn.Module) -> None:
        """Hold the budget over a further model too, such as the second network of a GAN.

        A part of a governed model, given on its own, is from now on also governed where it is called on its own.

        Args:
            model: The model. If parts of it were governed on their own, they belong to it from now on.

        Raises:
            UsageError: It is compiled, under a plan, or on another device.
        """
        if self._governed.add(model, self._call) and self._running is not None:
            self._running.is_whole = False

    def release(self, model: torch.nn.Module) -> None:
        """Hold the budget no longer over a model and its parts.

        Args:
            model: The model.
        """
        self._governed.release(model)

    def is_within_call(self) -> bool:
        """Whether the calling thread is within a governed call."""
        return getattr(self._depth, "now", 0) > 0

    # Calls ------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, number: int, args: Any, kwargs: Any) -> Iterator[None]:
        """Surround one call of a governed module."""
        depth = getattr(self._depth, "now", 0)
        if depth == 0 and not self._begins(number, args, kwargs):
            yield
            return
        self._depth.now = depth + 1
        try:
            with self._running.step.around_call() if depth == 0 and self._running else nullcontext():
                yield
        except BaseException:
            if depth == 0:
                self._abandon()
            raise
        finally:
            self._depth.now = depth
        if depth == 0:
            self._call_ended()

    @contextmanager
    def region(self) -> Iterator[None]:
        """Mark a region that computes for training without calling a governed module.

        Only needed where a framework calls parts of a model in ways that `pooch.auto` does not see.
        """
        with self._call(-1, (), {}):
            yield

    def _begins(self, number: int, args: Any, kwargs: Any) -> bool:
        """Whether an outermost call belongs to a step, which begins now if none is running."""
        if self._is_removed or BackwardWatch.is_running() or not is_ordinary_call():
            return False
        running = self._running
        if running is not None and running.thread != threading.get_ident():
            return False  # another thread trains under the budget, which bounds the whole process anyway
        if running is not None and (running.calls >= MOST_FORWARDS or running.is_read_elsewhere):
            self._end(is_complete=False)
            running = None
        if running is None:
            self._begin(number, args, kwargs)
        assert self._running is not None
        self._running.calls += 1
        self._look_at_calls(self._running)
        return True

    def _look_at_calls(self, running: _Running) -> None:
        """Hold the budget from here on if a step that fits turns out to call more than the recorded one."""
        if running.decision == "in-core" and 0 < running.known.calls < running.calls and can_outlast_the_call():
            self._go_online(running)

    def _begin(self, number: int, args: Any, kwargs: Any) -> None:
        models = self._governed.living
        parameters = [parameter for model in models for parameter in model.parameters()]
        key = step_key(number, args, kwargs, models, parameters)
        self._look_between()
        if self._tally.all_steps + 1 in _RECOUNTED_STEPS:
            self._live.recount()
            if self.budget_bytes is not None:
                self._evictor.set_budget(self.budget_bytes)
        stats = RunStats()
        start_bytes = self._live.now()
        decision, known = self._library.choose(key, start_bytes, self.budget_bytes)
        outlasts = can_outlast_the_call()
        if decision == "record" and (is_profiling() or not outlasts):
            self._library.not_recorded(key, known)
            decision = known.decision = "online"
        if has_own_hooks():  # only the innermost hooks are asked, and the program's may change what is kept
            decision = known.decision = "in-core"
            known.reason = "the program has saved tensor hooks of its own around it"
        self._evictor.begin_step(stats)
        if self._share is not None and self.budget_bytes is None:
            self._evictor.grow_with(self._share)
        step = self._new_step(key, decision, known, models, start_bytes)
        self._running = _Running(key, decision, known, step, stats, outlasts)

    def _new_step(
        self, key: StepKey, decision: Decision, known: Known, models: list[torch.nn.Module], start_bytes: int
    ) -> Step:
        match decision:
            case "in-core":
                return InCoreStep()
            case "plan":
                assert known.plan is not None
                return FollowingStep(self._evictor, known.plan, known)
            case "record":
                return RecordedStep(self._evictor, models, start_bytes, self._governed.name)
            case _:  # where allocations do not ask for room, it is made before each op
                return UnplannedStep(self._evictor, replays=not self._live.asks or self._library.replays(key))

    def _call_ended(self) -> None:
        """Take hooks and modes away with the call where they cannot stay until the backward pass."""
        running = self._running
        if running is not None and not running.outlasts:
            self._close_forward(running)

    def _abandon(self) -> None:
        """End a step whose forward pass failed."""
        if self._running is not None:
            self._end(is_complete=False)

    # The backward pass ------------------------------------------------------------------------------------------------

    def _backward_begins(self, builds_graph: bool) -> None:
        running = self._running
        if running is None or running.thread != threading.get_ident():
            self._evictor.hold()
            if running is not None:
                running.is_read_elsewhere = True
        elif builds_graph and running.is_open and running.outlasts:
            self._go_online(running)  # what this backward pass saves is read by the next one
        else:
            self._close_forward(running)

    def _backward_ended(self, is_complete: bool, builds_graph: bool) -> None:
        running = self._running
        if running is None or running.thread != threading.get_ident():
            return
        if not (builds_graph and running.is_open):
            self._end(is_complete)

    def _go_online(self, running: _Running) -> None:
        """Go on under the online policy, unless the step is under it already."""
        if running.decision == "online":
            return
        running.step.close_forward()
        running.step.end(is_complete=False)
        if running.decision == "record":
            self._library.cannot_record(running.key, running.known)
        running.decision = "online"
        running.step = UnplannedStep(self._evictor)

    def _close_forward(self, running: _Running) -> None:
        if running.is_open:
            running.is_open = False
            running.step.close_forward()

    def _end(self, is_complete: bool) -> None:
        running, self._running = self._running, None
        assert running is not None
        self._close_forward(running)
        step_ms = (time.perf_counter() - running.begin_s) * 1000
        peak_bytes = self._live.peak()
        profile = running.step.end(is_complete and running.is_whole)
        if profile is not None:
            self._library.recorded(running.key, running.known, profile, running.calls)
            if self.budget_bytes is None and self._share is not None:
                self._budget_is(int(self._share * profile.peak_bytes))
        elif running.decision == "record":
            self._library.not_recorded(running.key, running.known)
        if isinstance(running.step, UnplannedStep) and running.step.is_faster_copied:
            self._library.is_faster_copied(running.key)
        self._count(running, step_ms, peak_bytes)
        self._live.reset_peak()

    def _state_appeared(self, size_bytes: int) -> None:
        """Count the state that an optimizer has created: it is part of every later step's in-core peak."""
        if self._share is not None and self.budget_bytes is not None and size_bytes > 0:
            self._budget_is(self.budget_bytes + int(self._share * size_bytes))

    def _budget_is(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._evictor.grow_with(None)
        self._evictor.set_budget(budget_bytes)
        self._tell(
            f"the budget is {format_bytes(budget_bytes)}, {self._share:.0%} of the first step's in-core peak, with the "
            "optimizer's state as far as it exists"
        )

    def _count(self, running: _Running, step_ms: float, peak_bytes: int) -> None:
        left, known = running.step.left_plan, running.known
        if running.decision == "plan":
            known.left_plan = known.left_plan + 1 if left else 0
        is_slower = running.decision in ("plan", "online") and known.profile is not None
        lost_ms = step_ms - known.profile.step_ms if is_slower and known.profile is not None else 0.0
        self._tally.count(running.decision, left, running.stats, peak_bytes, lost_ms)
        if self.budget_bytes is not None and peak_bytes > self.budget_bytes:
            self._tally.over_budget += 1
            self._tell_of(running, peak_bytes, self.budget_bytes)

    def _tell_of(self, running: _Running, peak_bytes: int, budget_bytes: int) -> None:
        """Tell of a peak over the budget, once for each way of running."""
        if running.decision == "in-core" and running.known.profile is not None:
            running.known.left_plan = MOST_FAILURES  # it does more than it did when it was recorded
            why = "it was known to fit, and did more than when it was recorded; its next step is recorded again"
        elif running.decision == "in-core":
            why = "the program has saved-tensor hooks of its own, so nothing is done: take them away"
        else:
            why = (
                "everything that can leave had left, and the rest is parameters, gradients, the optimizer's state and "
                "what single ops need; raise the budget or lower the batch size"
            )
        if why not in self._told:
            self._told.add(why)
            self._tell(
                f"a step took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - budget_bytes)} over the budget of "
                f"{format_bytes(budget_bytes)}: {why}"
            )

    def _look_between(self) -> None:
        """Take the peak since the last backward pass into account."""
        self._tally.between_bytes = max(self._tally.between_bytes, self._live.peak())

    # For the user -----------------------------------------------------------------------------------------------------

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans that are in use, by the shapes of their steps."""
        return {key.text: plan for key, plan in self._library.plans.items()}

    @property
    def planned(self) -> tuple[tuple[str, Profile, Plan], ...]:
        """The shapes, the profile and the plan of each kind of step that has one."""
        return tuple(self._library.planned())

    @property
    def is_planning(self) -> bool:
        """Whether a plan is being made beside training."""
        return self._library.is_planning

    def summary(self) -> AutoSummary:
        """Return what happened so far."""
        return self._tally.summary(self.budget_bytes, self._library)

    def remove(self) -> None:
        """Hold the budget no longer. A step that is running ends under it.

        Raises:
            UsageError: If a step is running in another thread, which alone can end it.
        """
        if self._is_removed:
            return
        if self._running is not None and self._running.thread != threading.get_ident():
            raise UsageError("a step is running in another thread: call remove() there, or after its backward pass")
        self._is_removed = True
        if self._running is not None:
            self._end(is_complete=False)
        self._look_between()
        if self._state is not None:
            self._state.stop()
        self._governed.remove()
        self._closed()
        if _ACTIVE.get(self._device.type) is self:
            del _ACTIVE[self._device.type]

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


_ACTIVE = weakref.WeakValueDictionary()


def _leave_child_alone() -> None:
    """In a forked child, such as a worker that loads data: hold nothing. The threads of its parent are not here."""
    for held in list(_ACTIVE.values()):
        held._is_removed = True
        if held._running is not None:
            held._close_forward(held._running)
            held._running = None
        held._live.ask(False)
        held._live.let_go()
    _ACTIVE.clear()


os.register_at_fork(after_in_child=_leave_child_alone)


def _close(backward: BackwardWatch, library: Library, evictor: Evictor) -> None:
    """Undo what a budget has put in place. It must not hold the budget, whose end may call it."""
    backward.stop()
    library.close()
    evictor.close()


def _announce(text: str) -> None:
    sys.stderr.write(f"pooch: {text}\n")
    sys.stderr.flush()


def auto(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    host_budget: int | str | None = None,
    cache: str | Path | None = None,
    process_group: object = None,
    tell: Callable[[str], None] | None = None,
) -> Auto:
    """Hold a budget over any training loop, from its first step on: `pooch.auto(model, "16GiB")`.

    The loop stays as it is. A step that is not known runs under the online policy, which lets saved activations leave
    as live bytes would pass the budget, and is recorded. Steps that fit are left alone. For others a plan is made
    beside training, and taken when the next such step begins. Losses and gradients are bitwise those of plain training.

    Args:
        model: The model, or all models that are trained, which share the budget.
        budget: Device bytes of the process, such as "16GiB", or a share of the first step's in-core peak, such as
            "60%".
        optimizer: Not needed: the optimizer's state is counted as it appears.
        host_budget: Most bytes that a step may take in the swap tier. None: no limit.
        cache: Directory in which plans are kept for the next run of the same model. None: they are not kept.
        process_group: Not supported yet.
        tell: Called with one line for each new plan. None: they go to the standard error stream.

    Returns:
        What holds the budget. `remove()`, or leaving it as a context manager, takes it off.

    Raises:
        UsageError: The model is compiled or under a plan, or the budget does not parse.
    """
    if process_group is not None:
        raise UsageError("process_group is not supported yet: each process holds its own budget")
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    if not models:
        raise UsageError("auto() needs at least one model")
    return Auto(models, budget, host_budget=host_budget, cache=cache, tell=tell)
