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

from ..api.budgets import is_smallest, parse_budget
from ..api.options import PlanOptions
from ..errors import UsageError
from ..executor.attachment import callable_parts
from ..executor.engines import make_engine
from ..executor.online import Evictor, live_bytes_of
from ..executor.statistics import RunStats
from ..ir import Plan, Profile
from ..profiler.live import is_profiling
from ..torchtools.calls import PLACE, CallRegion, refuse_compiled, refuse_taken
from ..torchtools.training_state import model_device
from ..units import format_bytes, parse_bytes
from .backward import BackwardWatch
from .cache import PlanCache
from .library import Decision, Known, Library
from .optimizers import OptimizerWatch
from .signature import StepKey, step_key
from .stacks import can_outlast_the_call, has_own_hooks, is_ordinary_call
from .steps import FollowingStep, InCoreStep, RecordedStep, Step, UnplannedStep
from .summary import AutoSummary

PLANNING_TIME_LIMIT_S = 10.0
MOST_FORWARDS = 64  # calls without a backward pass after which a step is taken to be over
_RECOUNTED_STEPS = (1, 2, 3, 10, 100)

_ACTIVE: weakref.WeakValueDictionary[str, Auto]


class _GovernedCall(CallRegion):
    """A call of a governed module, which may begin a step."""

    def __init__(self, module: torch.nn.Module, auto: Auto, number: int) -> None:
        super().__init__(module, _nothing, "plan" if number >= 0 else "watch")
        self._auto, self._number = auto, number  # the model keeps the budget alive, and nothing else does

    def region_of(self, args: Any, kwargs: Any) -> Any:
        return self._auto._call(self._number, args, kwargs)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


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
        for model in models:
            if not isinstance(model, torch.nn.Module):
                raise UsageError(f"auto() takes a torch.nn.Module or a list of them, not {type(model).__name__}")
            refuse_taken(model)
        devices = {model_device(model) for model in models}
        if len(devices) != 1:
            raise UsageError(f"the models are on {len(devices)} devices: use pooch.auto for those of one device")
        self._device = devices.pop()
        if self._device.type in _ACTIVE:
            raise UsageError(
                f"a budget is held on {self._device.type} already: give all models in one list, as in "
                "pooch.auto([generator, discriminator], ...), or call remove() on the other first"
            )
        self.budget_bytes, self._share = budget_of(budget)
        self._models: list[Callable[[], torch.nn.Module | None]] = [weakref.ref(model) for model in models]
        self._name = " + ".join(type(model).__name__ for model in models)
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
        self._lock = threading.RLock()
        self._counts = dict.fromkeys(("in-core", "plan", "online", "record", "left plan", "over budget"), 0)
        self._peak_bytes = self._between_bytes = self._swapped_bytes = self._recomputed_ops = 0
        self._lost_ms = 0.0
        self._warned = False
        self._is_removed = False
        self._calls: list[weakref.ref[_GovernedCall]] = []
        for number, model in enumerate(models):
            self._place(model, number)
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

    def _place(self, model: torch.nn.Module, number: int) -> None:
        placed = [_GovernedCall(model, self, number)]
        placed += [_GovernedCall(part, self, -1 - number) for _, part in callable_parts(model)]
        self._calls += [weakref.ref(each) for each in placed]

    def add(self, model: torch.nn.Module) -> None:
        """Hold the budget over a further model too, such as the second network of a GAN.

        A part of a governed model, given on its own, is from now on also governed where it is called on its own.

        Args:
            model: The model. If parts of it were governed on their own, they belong to it from now on.

        Raises:
            UsageError: It is compiled, under a plan, or on another device.
        """
        for number, whole in enumerate(self._models):
            if any(each is model for each in _modules_of(whole())):
                if not isinstance(vars(model).get(PLACE), _GovernedCall):
                    self._calls.append(weakref.ref(_GovernedCall(model, self, -1 - number)))
                return
        if model_device(model) != self._device:
            raise UsageError(f"the budget is held on {self._device}, and the model is on {model_device(model)}")
        refuse_compiled(model)
        self.release(model)
        refuse_taken(model)
        free = (number for number, each in enumerate(self._models) if each() is None)
        number = next(free, len(self._models))  # copies that live for one step share a number, and so their plans
        self._models[number : number + 1] = [weakref.ref(model)]
        self._place(model, number)
        self._name = " + ".join(type(each).__name__ for each in self._living())
        if self._running is not None:
            self._running.is_whole = False

    def release(self, model: torch.nn.Module) -> None:
        """Hold the budget no longer over a model and its parts.

        Args:
            model: The model.
        """
        parts = list(model.modules())
        for part in parts:
            placed = vars(part).get(PLACE)
            if isinstance(placed, _GovernedCall):
                placed.remove()
        for number, reference in enumerate(self._models):
            if any(each is reference() for each in parts):
                self._models[number] = _no_model  # others keep their numbers

    def is_within_call(self) -> bool:
        """Whether the calling thread is within a governed call."""
        return getattr(self._depth, "now", 0) > 0

    def _living(self) -> list[torch.nn.Module]:
        return [model for model in (each() for each in self._models) if model is not None]

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
        models = self._living()
        parameters = [parameter for model in models for parameter in model.parameters()]
        key = step_key(number, args, kwargs, models, parameters)
        self._look_between()
        if sum(self._counts[kind] for kind in ("in-core", "plan", "online", "record")) + 1 in _RECOUNTED_STEPS:
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
        step = self._new_step(decision, known, models, start_bytes)
        self._running = _Running(key, decision, known, step, stats, outlasts)

    def _new_step(self, decision: Decision, known: Known, models: list[torch.nn.Module], start_bytes: int) -> Step:
        match decision:
            case "in-core":
                return InCoreStep()
            case "plan":
                assert known.plan is not None
                return FollowingStep(self._evictor, known.plan, known)
            case "record":
                return RecordedStep(self._evictor, models, start_bytes, self._name)
            case _:
                return UnplannedStep(self._evictor)

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
        counts, stats = self._counts, running.stats
        left = running.step.left_plan
        counts["online" if left else running.decision] += 1
        counts["left plan"] += left
        if running.decision == "plan":
            running.known.left_plan = running.known.left_plan + 1 if left else 0
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        self._swapped_bytes += stats.swapped_out_bytes
        self._recomputed_ops += stats.recomputed_ops
        profile = running.known.profile
        if profile is not None and running.decision in ("plan", "online"):
            self._lost_ms += max(0.0, step_ms - profile.step_ms)
        if self.budget_bytes is not None and peak_bytes > self.budget_bytes:
            counts["over budget"] += 1
            self._warn_of(peak_bytes)

    def _warn_of(self, peak_bytes: int) -> None:
        if not self._warned:
            self._warned = True
            assert self.budget_bytes is not None
            self._tell(
                f"a step took {format_bytes(peak_bytes)}, {format_bytes(peak_bytes - self.budget_bytes)} over the "
                f"budget of {format_bytes(self.budget_bytes)}: everything that can leave had left, and the rest is "
                "parameters, gradients, the optimizer's state and what single ops need; raise the budget or lower the "
                "batch size"
            )

    def _look_between(self) -> None:
        """Take the peak since the last backward pass into account."""
        self._between_bytes = max(self._between_bytes, self._live.peak())

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
        counts = self._counts
        recorded, online = counts["record"], counts["online"] + counts["record"]
        return AutoSummary(
            budget_bytes=self.budget_bytes,
            steps=counts["in-core"] + counts["plan"] + online,
            steps_in_core=counts["in-core"],
            steps_on_plan=counts["plan"],
            steps_online=online,
            steps_recorded=recorded,
            steps_left_plan=counts["left plan"],
            peak_bytes=self._peak_bytes,
            between_peak_bytes=self._between_bytes,
            steps_over_budget=counts["over budget"],
            lost_ms=self._lost_ms,
            swapped_bytes=self._swapped_bytes,
            recomputed_ops=self._recomputed_ops,
            shapes=self._library.shapes(),
            events=tuple(self._library.events),
        )

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
        for reference in self._calls:
            placed = reference()
            if placed is not None:
                placed.remove()
        self._closed()
        if _ACTIVE.get(self._device.type) is self:
            del _ACTIVE[self._device.type]

    def __enter__(self) -> Auto:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


_ACTIVE = weakref.WeakValueDictionary()


def _no_model() -> None:
    return None


def _modules_of(model: torch.nn.Module | None) -> Iterator[torch.nn.Module]:
    return iter(()) if model is None else model.modules()


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


def budget_of(budget: int | str) -> tuple[int | None, float | None]:
    """Return the budget in bytes, or the share of the first step's in-core peak.

    Args:
        budget: Bytes, a text such as "16GiB", or a share such as "60%".

    Raises:
        UsageError: It does not parse.
    """
    if is_smallest(budget):
        raise UsageError(
            "the budget cannot be 'min' here, as nothing is known before the first step: give bytes or a %"
        )
    if isinstance(budget, str) and budget.strip().endswith("%"):
        parsed = parse_bytes(budget, whole_bytes=10**6)
        if parsed is None or not 0 < parsed <= 10**6:
            raise UsageError(f"the budget {budget!r} is no share: give a percentage such as 60%, or bytes")
        return None, parsed / 10**6
    return parse_budget(budget, None), None


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
