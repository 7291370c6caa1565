"""Drives the steps under a budget: where they begin and end, and how each of them runs."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch

from ..api.recompute import AllowRecompute
from ..executor.evictor import Evictor
from ..executor.own_work import OWN_WORK
from ..executor.statistics import RunStats
from ..executor.step import Step
from ..ground.errors import TierError, UsageError
from ..ground.weakly import weakly
from ..ir import Profile
from ..machine.account import LiveBytes
from ..profiler.live import needs_profiler
from ..profiler.step import is_profiling
from ..torchtools.accelerators import has_streams
from ..torchtools.calls import CallContext
from ..torchtools.lost_interrupts import LOST_INTERRUPTS
from ..torchtools.module_changes import ModuleChanges
from ..torchtools.module_tensors import module_tensors
from ..torchtools.ranks import will_arrange_buckets
from ..torchtools.standing_aside import CallsEverywhere, backward_is_compiled
from ..torchtools.tensors import find_tensors
from ..torchtools.threads import OwnThread, is_alone, trains_here
from .backward import RUNNING, BackwardWatch
from .budget import HeldBudget
from .counting import margin_bytes
from .driven_calls import DrivenCall, Here, QuietCall
from .excess import why_over_budget
from .garbage import Garbage
from .governed import GovernedModels
from .graph_recompute import GraphRecompute, StepRoom
from .held_devices import note_held, note_released
from .known import Known
from .last_step import LastStep
from .library import MOST_FAILURES, Library
from .native_quiet import NativeQuiet
from .persistence import Persistence
from .quiet import FAR_SHARE, QuietCalls, QuietKind, QuietTally
from .remarks import BACKWARD_IS_COMPILED, NOTHING_LEFT, OWN_HOOKS, OWN_HOOKS_FIRST, Remarks
from .running import RunningStep
from .signature import REGION, StepKey, step_key
from .stacks import can_outlast_the_call, has_own_hooks, is_ordinary_call, nothing_is_around
from .standstill import Standstill
from .staying import Staying
from .steps import IN_CORE, DrivenStep, GovernedStep, RecordedStep
from .summary import Counters, Decision, StepTimes, between, counted
from .uncalled import UncalledSteps

MOST_FORWARDS = 64  # calls without a backward pass after which a step is taken to be over
TIGHT_SHARE = 0.7  # of the budget: a step that is known to take more is watched, though it fits
_MOST_UNSETTLED_STEPS = 64  # a wrapper that has not arranged its buckets by then never will, as under `no_sync` alone
_RECOUNTED_STEPS = (1, 2, 3, 10, 100)  # or the next one that is not far away from the budget
_BESIDE_STEPS = 2  # that a step of another thread may have been beside, from when it began
_SELDOM_CHANGED = (2, 3)  # of these: those that count again only if some of what was counted is gone


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
        persistence: What outlives steps, and may leave. Closed by `remove`.
        allow_recompute: What compiled graphs may make again.

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
        persistence: Persistence,
        allow_recompute: AllowRecompute = "exact",
    ) -> None:
        self._persistence = persistence
        self.governed, self.budget, self.evictor, self.library = governed, budget, evictor, library
        self._live, self._garbage = live, Garbage(live)
        self._last = LastStep()
        self._counters, self._steps, self._between_peak_bytes = Counters(), 0, 0
        self._before_bytes = live.now()
        self._times, self._is_compared = persistence.times, False  # whether what was told of the last step is
        self._recounts = 0  # that were due so far
        self._beside_at = -_BESIDE_STEPS  # steps so far when another thread began one that is not governed
        self._tally, self._quiet_call = QuietTally(), QuietCall(self)
        self._quiet: RunningStep | None = None  # what runs the next step, if that may be quiet
        self._remarks = remarks
        self._running: RunningStep | None = None  # of the thread that `_claimed` names, and changed by it alone
        self._claimed: OwnThread | None = None
        self._left_open: list[RunningStep] = []  # whose hooks only their threads can take away, which wait
        self._claiming = threading.Lock()
        self.here = Here()  # the models hold it too: it must not be needed once this is gone
        self._is_removed = False
        self._of_tier: list[str] = []  # to be told between steps: the tier may fail in the middle of an op
        evictor.engine.health.tell = self._of_tier.append
        evictor.engine.probe()
        self._tell_of_tier()
        self._changes = ModuleChanges()
        self._native = NativeQuiet(self._quiet_call, live, budget, library, self._changes, self._of_tier, evictor)
        governed.quiet_steps = self._native.steps
        persistence.listen(self._native.steps)
        governed.place(self._surround, self.here, weakly(self.compiled_comes))
        self._backward = BackwardWatch(self._backward_begins, self._backward_ended)
        self._backward.start()
        self._uncalled = UncalledSteps(weakly(self.uncalled_region))
        self._left_bytes, self._came_bytes = 0, 0  # live after the last step; what had come until a pass of no step
        self._compiled = CallsEverywhere(weakly(self.compiled_call))
        self._compiled.begin()
        self._staying = Staying(evictor, lambda: governed.living, persistence.states)
        self._standstill = Standstill(weakly(self.take_over))
        self._standstill.begin()
        self.graphs = GraphRecompute(weakly(self.room)) if allow_recompute == "rounding" else None
        ends = ExitStack()  # the last one first; it must not hold the driver, whose end may close it
        for end in (evictor.close, persistence.close, library.close):
            ends.callback(end)
        if self.graphs is not None:
            ends.callback(self.graphs.stop)
        for end in (self._compiled.end, self._changes.stop, self._backward.stop, self._standstill.end):
            ends.callback(end)
        ends.callback(LOST_INTERRUPTS.leave, evictor)
        self._closed = weakref.finalize(self, ends.close)
        self._closed.atexit = False
        evictor.last_resort = weakly(self.find_more)  # by now another thread may ask for it
        LOST_INTERRUPTS.use(evictor)
        note_held(governed.device, self)

    @property
    def counters(self) -> Counters:
        """What happened so far."""
        self._count_native()
        counted = self._counters.with_step(self._tally.counters())
        steps_over = counted.steps_over_budget + self.budget.first_steps_over
        return replace(counted, between_peak_bytes=self._between_peak_bytes, steps_over_budget=steps_over)

    @property
    def last(self) -> LastStep:
        """The step that ended last."""
        self._count_native()
        return self._last

    def _count_native(self) -> None:
        """Take what has run natively into account."""
        found = self._native.count()
        if found is None:
            return
        self._note_between(found.between_peak_bytes)
        if found.steps:
            self._steps += found.steps
            self._tally.add(found.steps, found.steps_ms, found.peak_bytes)
            self._last = LastStep.of("in-core", False, found.last_peak_bytes, None)
        for kind, steps in found.of_kinds:
            self.library.chose_again(kind, steps)

    def take_over(self) -> None:
        """Have nothing run natively from here on. What does anything else calls this first, in whatever thread."""
        running = self._native.take_over()
        self._count_native()
        if self._left_open:
            self._close_left_open()
        if running is not None:
            self._claimed, self._running, self._standstill.is_in_step = running.thread, running, True

    def add(self, model: torch.nn.Module) -> None:
        """Govern a further model too."""
        self.take_over()
        self._native.forget()
        if self.governed.add(model, self._surround, self.here) and self._running is not None:
            self._running.is_whole = False

    @property
    def running(self) -> RunningStep | None:
        """The step that is running."""
        return self._running

    def is_within_call(self) -> bool:
        """Whether the calling thread is within a governed call."""
        return self.here.is_within_call

    # Calls ------------------------------------------------------------------------------------------------------------

    def region(self) -> DrivenCall:
        """Return a context that counts as a call of a governed module."""
        return DrivenCall(self, REGION, (), {}, None)

    def uncalled_region(self) -> DrivenCall | None:
        """Return a context for a step without a call, or None if the budget is held no longer."""
        if self._is_removed:
            return None
        return self.region()

    def expect_uncalled(self) -> None:
        """Have steps begin where something is first saved for a backward pass, as nothing governed is called."""
        self._uncalled.become_usual()
        self._uncalled.expect()

    def _surround(self, number: int, args: Any, kwargs: Any, quiet: QuietCalls) -> CallContext:
        """Surround one call of a governed module that is not within another one."""
        self.take_over()
        if quiet.kinds and self._begins_quietly(args, kwargs, quiet):
            return self._quiet_call
        return DrivenCall(self, number, args, kwargs, quiet)

    def _begins_quietly(self, args: Any, kwargs: Any, quiet: QuietCalls) -> bool:
        """Whether a call begins a step that is known to be far away from the budget: nothing is prepared for it.

        It is an ordinary call of the thread that has trained last, and nothing is left over that has to be seen to.
        """
        here = self.here
        running, last = here.quiet, here.call
        if (
            running is None
            or running is not self._quiet
            or self._running is not None
            or RUNNING.depth
            or (last is not None and not last.is_ended)
            or self._uncalled.are_usual
            or not nothing_is_around()
        ):
            return False
        standstill = self._standstill
        standstill.is_in_step = True
        if standstill.is_ending:
            standstill.pass_by(is_in_step=True)
        with self._claiming:
            if self._claimed is not None:
                return False
            self._claimed = running.thread
        try:
            kind = quiet.find(args, kwargs, self._changes.given.count)
            if kind is None:
                return False
            self.budget.look(is_quiet=True)
            start_bytes = self._live.now()
            far_bytes = FAR_SHARE * (self.budget.size_bytes or 0)
            if kind.expected_bytes(start_bytes) > far_bytes or not self.library.choose_again(kind):
                return False
            self._look_between()
            self._live.reset_peak()
            running.begin_again(kind, start_bytes, far_bytes)
            self._native.teach(quiet, args, kwargs, kind)
            self._running = running
        finally:
            if self._running is None:
                self._claimed = None
        return True

    def begins_step(self, number: int, args: Any, kwargs: Any, quiet: QuietCalls | None) -> bool:
        """Whether an outermost call belongs to a step, which begins now if none is running."""
        self.take_over()
        self.here.is_beside = False
        last, self.here.call = self.here.call, None
        if last is not None and not last.is_ended:  # Ctrl-C came at its end
            last.__exit__(KeyboardInterrupt, None, None)
        if self._is_removed or BackwardWatch.is_running() or not is_ordinary_call():
            return False
        if self._uncalled.are_expected:  # there are calls after all
            self._uncalled.called()
        self._standstill.pass_by(is_in_step=True)
        if self._claim() and self._running is not None and self._running.is_over(MOST_FORWARDS):
            self._end(is_complete=False)
        if not self._claim() and not self._end_left_open():
            self.here.is_beside, self._quiet = True, None  # another thread trains under the budget
            self._beside_at = self._steps
            self.evictor.rest()
            return False
        if self._running is None:
            try:
                with torch._C.DisableTorchFunction():
                    self._begin(number, args, kwargs, quiet)
            finally:
                self._claimed = None if self._running is None else self._running.thread
        assert self._running is not None
        self._running.calls += 1
        self._running.is_in_call = True
        self._look_at_calls(self._running)
        return True

    def _claim(self) -> bool:
        """Whether the calling thread alone may begin and end steps: it has one, or no thread that is alive has."""
        self.take_over()
        with self._claiming:
            claimed = self._claimed  # whose thread may give it back at any moment
            if claimed is None or claimed.has_ended:
                claimed = self._claimed = OwnThread()
            return claimed.is_here

    def _end_left_open(self) -> bool:
        """Whether the calling thread alone may begin steps, as the one that has a step waits outside of it for others.

        A thread that trains at the same time waits now and then, too, so this is not so at the first step beside it.
        """
        running = self._running
        if running is None:
            return False
        running.beside += 1
        if not running.is_left_open():
            return False
        with self._claiming:
            if self._running is not running or self._claimed is not running.thread:
                return False
            self._claimed = OwnThread()
        self._left_open.append(running)
        self._end(is_complete=False)
        return self._claim()

    def _close_left_open(self) -> None:
        """Take away the hooks of steps that other threads have ended while the calling one waited."""
        for running in [each for each in self._left_open if each.is_of_this_thread or each.thread.has_ended]:
            running.step.close_forward()
            self._left_open.remove(running)

    def _look_at_calls(self, running: RunningStep) -> None:
        """Hold the budget from here on in a step that calls more than the recorded one, or began within hooks."""
        if running.decision != "in-core" or not can_outlast_the_call():
            return
        if running.known.reason == OWN_HOOKS:
            running.is_open = running.outlasts = True
            running.known.decision, running.known.reason = "online", OWN_HOOKS_FIRST
            self._go_online(running)
        elif 0 < running.known.calls < running.calls:
            self._go_online(running)

    def _begin(self, number: int, args: Any, kwargs: Any, quiet: QuietCalls | None) -> None:
        begin_s = time.perf_counter()
        self._native.forget()  # the budget, the model, or what is known of its steps may have changed
        # PyTorch ends the process if one thread reads `parameter.grad` of a model that another one is training.
        alone = is_alone()
        models = self.governed.living if alone else self.governed.called(number)
        parameters = [parameter for model in models for parameter in module_tensors(model).parameters]
        key = step_key(number, args, kwargs, models, parameters)
        self._look_between()
        self.budget.look()
        if alone:
            self._count_again((args, kwargs))
        moving_ms = self._let_leave(key, models, (args, kwargs))
        stats = RunStats()
        start_bytes = self._live.now()
        settled = self._steps >= _MOST_UNSETTLED_STEPS or not any(map(will_arrange_buckets, models))
        has_tier = self.evictor.engine.health.begin_step(self.evictor.engine.probe)
        away = self._persistence.away
        decision, known = self.library.choose(
            key,
            start_bytes,
            self.budget.size_bytes,
            is_settled=settled,
            has_tier=has_tier,
            away=away,
        )
        outlasts = can_outlast_the_call()
        if decision == "record" and (not outlasts or (is_profiling() and needs_profiler(self.governed.device))):
            self.library.not_recorded(key, known)
            decision = known.decision = "online"
        if decision == "record" and not self.library.may_record(key, known, models):
            decision = known.decision = "online"
            self._persistence.has_compiled = True
        if not self._persistence.may_plan and decision in ("record", "plan"):
            if decision == "record":
                self.library.not_recorded(key, known)
            decision = known.decision = "online"
            known.reason = "parameters or gradients leave the device"
        if has_own_hooks():  # only the innermost hooks are asked, and the program's may change what is kept
            decision = known.decision = "in-core"
            known.reason = OWN_HOOKS
        if backward_is_compiled():
            decision = known.decision = "in-core"
            known.reason = BACKWARD_IS_COMPILED
        self._prepare(stats, models)
        self.budget.step_begins()
        try:
            step = self._new_step(key, decision, known, models, start_bytes)
        except TierError as error:
            if decision != "plan":
                raise
            self.evictor.engine.health.failed(error)
            decision, known.reason = "online", str(error)  # there is no room for all that the plan swaps
            step = self._new_step(key, decision, known, models, start_bytes)
        self._quiet = None
        self._running = running = RunningStep(key, decision, known, step, stats, outlasts, start_bytes)
        running.begin_s, running.moving_ms, running.away_bytes = begin_s, moving_ms, away.all_bytes
        running.has_part_begun = number < 0 and quiet is not None
        if step is IN_CORE and quiet is not None and number >= 0 and self.governed.is_one:
            running.kind = self._kept_kind(running, models[0], args, kwargs, quiet)
        try:
            step.open(self._compiled_call_begins)
        except BaseException:
            self.abandon()
            raise
        running.beginning_ms = running.elapsed_ms
        self.evictor.own_time.restart()

    def _let_leave(self, key: StepKey, models: list[torch.nn.Module], given: Any) -> float:
        """Have what outlives steps leave where a step that begins has no room for it, and return how long that took."""
        self._times.step_begins()
        begin_s = time.perf_counter()
        budget_bytes = self.budget.size_bytes
        self._persistence.step_begins(models, budget_bytes, given, self.library.most_start_bytes(key, budget_bytes))
        return (time.perf_counter() - begin_s) * 1000 if self._times.moves else 0.0

    def _count_again(self, given: Any) -> None:
        """Count what came past the allocator: always what a step is given, and in some steps everything.

        Counting looks at tensors, and PyTorch ends the process if another thread is just releasing one of them.
        """
        self._live.count_given(find_tensors(given))
        reached = sum(self._steps + 1 >= number for number in _RECOUNTED_STEPS)
        due = _RECOUNTED_STEPS[self._recounts : reached]
        if due:
            self._live.recount(if_less=all(number in _SELDOM_CHANGED for number in due))
            self.budget.hold()
            self._recounts = reached  # else the next step counts

    def has_counted(self) -> None:
        """Note that everything was counted just now, as the first step begins."""
        self.budget.hold()  # less what was there before, which garbage may have made less
        self._recounts = 1

    def find_more(self) -> int | None:
        """Collect garbage, or else let the optimizers' state and the program's data leave in the step that runs.

        Returns:
            The bytes that garbage has freed, or None if there was none and nothing more may leave.
        """
        self.take_over()
        freed_bytes = self._garbage.collect(self._steps)
        persistence = self._persistence
        if not freed_bytes and (persistence.let_all_leave_now() or persistence.let_put_state_leave_now()):
            return 0
        running = self._running
        if freed_bytes or running is None or not running.is_of_this_thread:
            return freed_bytes or None
        if persistence.let_more_leave_now(running.step.storages):
            return 0
        if self.budget.is_told:
            self._staying.look()
        return None

    def _prepare(self, stats: RunStats, models: list[torch.nn.Module]) -> None:
        """Prepare for a step whose values may leave."""
        if self.graphs is not None:
            self.graphs.begin_step()
        OWN_WORK.is_over()
        self.evictor.begin_step(stats)
        self.evictor.verification.begin_step(models)

    def _kept_kind(
        self, running: RunningStep, model: torch.nn.Module, args: Any, kwargs: Any, quiet: QuietCalls
    ) -> QuietKind | None:
        """Note a step that begins, so that the next one of its kind can be quiet if it is far away from the budget."""
        known, profile = running.known, running.known.profile
        if profile is None:
            return None
        rise_bytes = profile.peak_bytes - profile.persistent_bytes
        kind = QuietKind(running.key, known, profile, running.start_bytes, rise_bytes, self.library.forgotten)
        far_bytes = FAR_SHARE * (self.budget.size_bytes or 0)
        is_far = self.budget.is_told and kind.expected_bytes(running.start_bytes) <= far_bytes
        if is_far and not self.evictor.has_values and self.evictor.engine.health.known is None and not has_own_hooks():
            quiet.add(model, args, kwargs, kind, self._changes.given.count)
            self._quiet = self.here.quiet = running.as_quiet()
        return kind

    def _new_step(
        self, key: StepKey, decision: Decision, known: Known, models: list[torch.nn.Module], start_bytes: int
    ) -> DrivenStep:
        match decision:
            case "in-core":
                if self._is_tight(known, start_bytes):
                    return GovernedStep(Step(self.evictor, replays=False, copies_ahead=False))
                return IN_CORE
            case "plan":
                assert known.plan is not None
                return GovernedStep.on_plan(self.evictor, known.plan, known)
            case "record":
                has_graphs = self.library.has_graphs(key)
                return RecordedStep(self.evictor, models, start_bytes, self.governed.name, has_graphs=has_graphs)
            case _:  # where allocations do not ask for room, it is made before each op
                must_replay = not self._live.asks or self.evictor.engine.health.known is not None
                replays = self.library.replays(key, must_replay=must_replay)
                notes_ops = not replays and self.library.looks_at_ops(key, models)
                return GovernedStep(Step(self.evictor, replays=replays), notes_ops=notes_ops)

    def _is_tight(self, known: Known, start_bytes: int) -> bool:
        """Whether a step that fits might pass the budget if it did somewhat more than the one that was recorded.

        Its saved tensors can leave then. Where allocations do not ask for room, nothing would make it in time.
        """
        budget_bytes = self.budget.size_bytes
        if known.profile is None or budget_bytes is None or not self._live.asks or has_own_hooks():
            return False
        expected_bytes = known.profile.peak_bytes + start_bytes - known.profile.persistent_bytes
        return expected_bytes > TIGHT_SHARE * budget_bytes

    def call_ended(self) -> None:
        """Take hooks and modes away with the call where they cannot stay until the backward pass."""
        running = self._running
        if running is not None and running.is_of_this_thread:
            running.is_in_call = False
            if not running.outlasts:
                running.close_forward()
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what could not be raised in the middle of an op, such as Ctrl-C, and end the step that is running."""
        try:
            self._live.raise_failure()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """End a step that failed."""
        self.take_over()
        running = self._running  # another thread may be ending it
        if running is not None and running.is_of_this_thread:
            self._quiet = None
            self._end(is_complete=False)

    # The backward pass ------------------------------------------------------------------------------------------------

    def _backward_begins(self, builds_graph: bool) -> None:
        self.take_over()
        running = self._running
        if running is not None and running.is_quiet and self.here.quiet is running and not builds_graph:
            running.is_in_backward, running.is_open = True, False
            if not self._standstill.is_ending:
                return
        self._standstill.pass_by(is_in_step=True)
        self._uncalled.leave()
        self._raise_failure()
        running = self._running
        if running is None or not running.is_of_this_thread:
            trains_here()
            if self.here.is_beside:  # it is that of the thread's own calls, which are not governed
                return
            self.evictor.hold()
            if running is not None:
                self._reads_elsewhere(running)
            else:
                self._look_between()
                self._live.reset_peak()
                self._came_bytes = self._live.now() - self._left_bytes
            return
        running.is_in_backward = True
        if builds_graph and running.is_open and running.outlasts:
            self._go_online(running)  # what this backward pass saves is read by the next one
        else:
            running.close_forward()
            if self.budget.growing is not None:
                self._persistence.gradients_come(self.budget.growing, running.start_bytes)
            if running.step is not IN_CORE and not self._persistence.has_compiled:
                running.open_backward(self.evictor)

    def _reads_elsewhere(self, running: RunningStep) -> None:
        running.is_read_elsewhere = True
        if self.budget.size_bytes is None and self.budget.share is not None:
            self._remarks.read_elsewhere(self.budget.share)

    def _backward_ended(self, is_complete: bool, builds_graph: bool) -> None:
        self.take_over()
        running = self._running
        if running is not None and running.is_quiet and is_complete and self._ends_quietly(running):
            return
        if running is None or not running.is_of_this_thread:
            is_of_no_step = running is None and not self.here.is_beside and not self._is_removed
            self.here.is_beside = False
            if is_of_no_step and is_complete and not builds_graph:
                self._ended_uncalled()
            return
        if builds_graph and running.is_open:
            running.is_in_backward = False
        else:
            was_known = self.budget.size_bytes is not None
            self._end(is_complete)
            self._left_bytes = self._live.now()
            self.here.leave_call()  # such as one that trains part by part
            if is_complete and not was_known and self.budget.size_bytes is not None:
                self._persistence.share_is_known(self.budget.size_bytes, self.budget.share)
            self._standstill.pass_by(is_in_step=False)
            if self._uncalled.are_usual:
                self._uncalled.expect()
        if is_complete:  # else its own error goes first
            self._raise_failure()

    def _ended_uncalled(self) -> None:
        """Expect the next step without a call, if a backward pass that is over shows that there is none."""
        if not self._uncalled.are_usual:
            is_first = not self._steps
            if not self.governed.have_gradients or not (is_first or self._has_passed_by()):
                return
            self._remarks.uncalled(is_first=is_first)
            self._persistence.step_passed_by()
            self._uncalled.become_usual(among_others=not is_first)
        self._uncalled.expect()

    def _has_passed_by(self) -> bool:
        """Whether a backward pass of no step exceeded the budget, and what had come since the last step explains it."""
        size_bytes, peak_bytes = self.budget.size_bytes, self._live.peak()
        return size_bytes is not None and peak_bytes - self._came_bytes <= size_bytes < peak_bytes

    def _ends_quietly(self, running: RunningStep) -> bool:
        """Whether a step is over for which nothing was done, and nothing had to be."""
        peak_bytes = self._live.peak()
        if (
            self.here.quiet is not running
            or not running.is_in_backward
            or peak_bytes > running.far_bytes  # else no allocation has asked for room, so none has failed to
            or not running.is_whole
            or self._of_tier
        ):
            return False
        running.is_ending = True
        tally = self._tally
        tally.steps += 1
        tally.steps_ms += (time.perf_counter() - running.begin_s) * 1000
        if peak_bytes > tally.peak_bytes:
            tally.peak_bytes = peak_bytes
        self._steps += 1
        last = self._last
        if last.peak_bytes != peak_bytes or last.mode != "in-core":
            self._last = LastStep.of("in-core", False, peak_bytes, None)
        self._live.reset_peak()
        self._running = self._claimed = None
        standstill = self._standstill
        standstill.is_in_step = False
        if standstill.is_ending:
            standstill.pass_by(is_in_step=False)
        if self._quiet is running and self.here.call is self._quiet_call and self._quiet_call.is_ended:
            self._native.go_on(running, self._backward)
        return True

    def _go_online(self, running: RunningStep) -> None:
        """Go on under the online policy, unless the step is under it already."""
        step = running.step
        if running.decision == "online" or (isinstance(step, GovernedStep) and not step.follows_plan):
            running.decision = "online"
            return
        running.step.close_forward()
        running.step.end(is_complete=False)
        if running.is_quiet:
            self._quiet, running.is_quiet = None, False
            running.stats, running.earlier_peak_bytes = RunStats(), self._live.peak()
            self._prepare(running.stats, self.governed.living)
        if running.decision == "record":
            self.library.cannot_record(running.known)
        self._follow(running, Step(self.evictor))

    def _compiled_call_begins(self) -> None:
        """Go on with a step in which all that leaves is copied, as a compiled graph is about to run."""
        self.take_over()
        running = self._running
        if running is None or not running.is_of_this_thread or not running.is_open:
            return
        running.step.close_forward()
        running.step.end(is_complete=False)
        if running.decision == "record":
            self.library.not_recorded(running.key, running.known)
        if running.step.left_plan:
            running.known.left_plan += 1
        else:
            self.library.is_compiled(running.key, running.known)
        self._persistence.has_compiled = True
        self._follow(running, Step(self.evictor, replays=False))

    def compiled_call(self, compiled: object) -> None:
        """Note a compiled call, anywhere. A model that was compiled after it was given is called within it, unseen.

        Args:
            compiled: What was compiled.
        """
        self.governed.release_parts()
        running = self._running
        if running is not None and running.is_of_this_thread and running.has_part_begun:
            self._uncalled.become_usual()  # no part's call is seen that could begin the next step
        module = getattr(compiled, "__self__", compiled)
        if not isinstance(module, torch.nn.Module) or self.here.is_within_call:
            return
        if self.governed.is_governed(module):
            self.governed.release(module)
            self._remarks.called_within_compiled()
        elif self._running is None and torch.is_grad_enabled() and self.governed.is_part(module):
            self.expect_uncalled()  # it begins the step

    def compiled_comes(self, compiled: torch.nn.Module) -> None:
        """Govern what was compiled of a governed model in place of it, as it is about to be called."""
        if not self.here.is_within_call:
            with suppress(UsageError):  # then its call is told of, like one within any compiled function
                self.add(compiled)

    def _follow(self, running: RunningStep, step: Step) -> None:
        running.decision, running.step = "online", GovernedStep(step)
        running.step.open(self._compiled_call_begins)

    def _end(self, is_complete: bool) -> None:
        running = self._running
        assert running is not None
        running.is_ending = True  # an interrupt leaves it here, and it is ended before the next step begins
        earlier_bytes = max(running.earlier_peak_bytes, self.budget.earlier_peak_bytes)
        step_ms, peak_bytes = running.elapsed_ms, max(self._live.peak(), earlier_bytes)
        if running.kind is not None:
            running.kind.seen(peak_bytes - running.start_bytes)
            self._native.forget()  # what it knew of the kind
        try:
            running.close_backward()
            running.close_forward()
            has_no_plan_yet = running.decision != "plan" and running.known.may_be_planned
            self._persistence.step_ends(peak_bytes - running.start_bytes, may_still_be_planned=has_no_plan_yet)
            profile = running.step.end(is_complete and running.is_whole)
        except Exception:
            self._running = self._claimed = None
            raise
        self._running = self._claimed = None
        self._note(running, profile, step_ms, peak_bytes, is_complete=is_complete)

    def _note(
        self, running: RunningStep, profile: Profile | None, step_ms: float, peak_bytes: int, *, is_complete: bool
    ) -> None:
        """Note what a step was like, for those to come."""
        if self.graphs is not None:
            self.budget.spared_bytes = self.graphs.spared_bytes
        if profile is not None:
            self.library.recorded(running.key, running.known, profile, running.calls)
            running.known.away_bytes = running.away_bytes
            self._remarks.margin(margin_bytes(self._live, profile))
            self.budget.step_was_recorded(profile.peak_bytes)
        elif running.decision == "online" and is_complete:
            self.budget.step_was_counted()  # also with models that came in its midst: allocators count, whoever asks
        elif running.known.reason == OWN_HOOKS and is_complete:
            self.budget.step_was_recorded(peak_bytes)
        elif running.decision == "record":
            self.library.not_recorded(running.key, running.known)
        self._garbage.step_ends(is_held=not self.evictor.missing_bytes)
        health = self.evictor.engine.health
        step = running.step
        if isinstance(step, GovernedStep):
            self._note_governed(running, step, step_ms, is_whole=is_complete and running.is_whole)
        health.end_step(has_copied=bool(running.stats.swapped_out_bytes))
        self._tell_of_tier()
        made_again = None if self.graphs is None else self.graphs.untold()
        if made_again is not None:
            self._remarks.made_again(made_again)
        for why in running.step.mismatches:
            self._remarks.plan_left(why)
        self._count(running, step_ms, peak_bytes)
        budget_bytes = self.budget.size_bytes
        if budget_bytes is not None and is_complete and running.is_whole and not running.step.left_plan:
            over_bytes = peak_bytes - budget_bytes
            own_ms = self._own_ms(running)
            self.library.ended(running.key, running.known, running.decision, step_ms, over_bytes, own_ms)
        self.library.banned(running.known, self.evictor.verification.take_new())
        self._live.reset_peak()

    def _note_governed(self, running: RunningStep, step: GovernedStep, step_ms: float, *, is_whole: bool) -> None:
        """Note what a step was like that was under pressure."""
        if not step.follows_plan and self.evictor.engine.health.fault is None:
            if step.replays and self.evictor.missing_bytes:
                self.library.is_leaner_copied(running.key)
            elif is_whole and running.known.decision == "online":
                own_ms = self._own_ms(running)
                self.library.online_took(running.key, step.effort, step_ms, own_ms, replays=step.replays)
        begun_on_plan = {"plan": True, "online": False}.get(running.known.decision)
        if is_whole and step.follows_plan is begun_on_plan:  # else it has become another one in its midst
            self.library.saw_ops(running.key, running.known, step.ops)

    def _count(self, running: RunningStep, step_ms: float, peak_bytes: int) -> None:
        left, known, budget_bytes = running.step.left_plan, running.known, self.budget.told_bytes
        known.has_left = left
        if running.decision == "plan":
            if running.step.mismatches:
                known.left_plan = MOST_FAILURES
            elif left:
                self.library.left_plan(running.key, known, has_other_sizes=running.stats.has_other_sizes)
            else:
                known.left_plan = known.lost_plans = 0
        times = self._step_times(running, step_ms)
        self._is_compared = times.told is not None and times.told.optimizer_ms > 0 and not left
        bounded_bytes = self.budget.bounded_bytes(peak_bytes)
        is_over = self.budget.count_step(bounded_bytes)
        step = counted(running.decision, left, running.stats, bounded_bytes, times, is_over_budget=is_over)
        self._counters, self._steps = self._counters.with_step(step), self._steps + 1
        self._last = LastStep.of(running.decision, left, peak_bytes, known.slowdown)
        if budget_bytes is not None and peak_bytes > budget_bytes:
            is_beside = self._steps - self._beside_at <= _BESIDE_STEPS
            has_compiled = self._persistence.has_compiled
            why = why_over_budget(running, self.evictor, peak_bytes - budget_bytes, has_compiled, is_beside)
            self.budget.passed(peak_bytes, *why)
            if NOTHING_LEFT in why and self.budget.is_told and (staying := self._staying.take()) is not None:
                self._remarks.staying(staying)

    def _step_times(self, running: RunningStep, step_ms: float) -> StepTimes:
        """Return what a step took beside what was told of such steps, as long as it ran as they were to run."""
        known, decision, moving_ms = running.known, running.decision, running.moving_ms
        if self._times.moves and decision != "plan":
            moving_ms += running.stats.host_stall_ms
        self._times.waited(moving_ms)
        told = None if self._times.is_measuring else known.told
        if told is not None and (told.missing or told.decision != decision):
            told = None
        own_ms = self._own_ms(running)
        if decision == "online" and own_ms is not None:
            return StepTimes(step_ms, step_ms - own_ms, own_ms, told)
        plain_ms = 0.0 if known.profile is None else known.profile.step_ms
        return StepTimes(step_ms, plain_ms if told is None else told.plain_ms, moving_ms, told)

    def _own_ms(self, running: RunningStep) -> float | None:
        """Return how long Pooch has worked in a step that has ended, or None where the device may compute meanwhile."""
        if has_streams(self.governed.device):
            return None
        return running.beginning_ms + self.evictor.own_time.ms

    def _tell_of_tier(self) -> None:
        while self._of_tier:
            self._remarks.tier(self._of_tier.pop(0))

    def room(self) -> StepRoom | None:
        """Return what there is room for in the step of the calling thread, or None if it runs none."""
        running = self._running
        if running is None or not running.is_of_this_thread:
            return None
        models = self.governed.living
        taken_bytes = running.start_bytes + self._persistence.states.bytes_to_come(models)
        return StepRoom(self.budget.size_bytes, self.budget.share, taken_bytes, models)

    def look_after_last(self) -> None:
        """Take into account what came after the last step, which else the next one does as it begins."""
        self.take_over()
        if self._running is None and not self._is_removed:
            self._look_between()

    def _look_between(self) -> None:
        """Take the peak since the last backward pass into account, and what optimizers have taken since."""
        self._note_between(self._live.peak())
        taken = self._times.take()
        if taken.optimizer_ms or taken.moving_ms:
            self._counters = self._counters.with_step(between(taken, is_compared=self._is_compared))

    def _note_between(self, peak_bytes: int) -> None:
        """Take a peak that came in no step into account. What was live before the budget is counted on its own."""
        if peak_bytes > self._between_peak_bytes and (self._steps or peak_bytes > self._before_bytes):
            self._between_peak_bytes = peak_bytes
            self.budget.passed_between(peak_bytes)

    def remove(self) -> None:
        """Hold the budget no longer. A step that is running ends under it.

        Raises:
            UsageError: If a step is running in another thread, which alone can end it.
        """
        if self._is_removed:
            return
        if not self._claim():
            raise UsageError("a step is running in another thread: call remove() there, or after its backward pass")
        self._is_removed, self._quiet = True, None
        self._uncalled.leave()
        if self._running is not None:
            self._end(is_complete=False)
        self._claimed = None
        self._look_between()
        self.budget.stop()
        self.governed.remove()
        try:
            self._closed()
        finally:
            self.library.join()
            note_released(self.governed.device, self)

    def leave_alone(self) -> None:
        """In a forked child, such as a worker that loads data: hold nothing. The threads of its parent are not here."""
        self.take_over()
        self._is_removed, self._quiet = True, None
        self._uncalled.leave()
        if self._running is not None:
            self._running.close_forward()
            self._running = None
        self._live.ask(False)
        self._live.let_go()
