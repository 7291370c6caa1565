"""The steps that were met, and how each kind of them is run: in-core, under its plan, or online."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import torch

from ..analysis.interpolation import KnownStep
from ..api.options import PlanOptions
from ..executor.owner import Effort
from ..executor.table import ActionTable
from ..ground.units import format_bytes, format_ms
from ..ground.wording import slower_than
from ..ir import Link, Plan, Profile
from ..torchtools.calls import compiled_part
from .cache import Cached, PlanCache
from .costs import CostSource
from .known import NOTHING_AWAY, Away, Family, Known, Trial, described, without_replays
from .loop_times import LEAVING, MOVING, LoopTimes
from .quiet import QuietKind
from .requests import Arrival, PlanRequests
from .shapes import KnownShapes
from .signature import StepKey
from .summary import Decision, PlannedShape

MOST_RECORDED = 3  # shapes of one family that are recorded without further reason
MOST_FAILURES = 3  # steps in a row that left their plan, after which the step is recorded again
MOST_LOST_PLANS = 2  # for which that was done
_NOTED_SHARE = 0.02  # of a step: what takes less is not told
# What steps on a plan have lost, before it is searched for a better one: that takes seconds of a core, during which the
# program's own ops take longer where cores share caches and memory.
WORTH_MS = 1000.0
OFTEN = 3  # steps of a shape that cannot be derived, after which it is recorded
PLANNED_SHARE = 0.995  # of the budget: a step is not repeated to the byte where values decide what it computes
MOST_EVENTS = 1000  # lines on what was planned that the summary can list
MOST_TOLD = 8  # kinds of steps that differ in sizes alone, for which it is told what is decided
LARGER = 1.05  # times as large is a budget with which all is planned anew
_NEVER = 2**62
OTHER_OPS = "its ops differ from step to step, so a plan of one is none of the next"
COMPILED_REASON = "compiled graphs run in it, so all that leaves is copied"
NOT_MEASURED = Link("not measured yet", 0.01, 0.01, 1e6, 1e6)


class Library:
    """Plans by the key of a step. New plans arrive from a worker, and are taken when a step begins.

    Args:
        options: How to plan.
        tell: Called with one line for each new plan.
        costs: What copies and hooks cost on this machine.
        cache: Keeps profiles and plans for the next run, or None.
        holds_beneath: Whether the budget is held beneath a plan as well, so that one that needs a little more than the
            budget can be followed.
        counts_peaks: Whether the peak of a step is known without a record.
        times: What steps take beside what plans know of, or None: nothing.

    Attributes:
        requests: What has plans made; it knows whether answers have come.
    """

    def __init__(
        self,
        options: PlanOptions,
        tell: Callable[[str], None],
        costs: CostSource,
        cache: PlanCache | None = None,
        *,
        holds_beneath: bool = True,
        counts_peaks: bool = True,
        times: LoopTimes | None = None,
    ) -> None:
        self._tell, self._times, self._cache, self._holds_beneath = tell, times or LoopTimes(), cache, holds_beneath
        self._counts_peaks = counts_peaks
        self._known = KnownShapes()
        self.requests = PlanRequests(options, costs, cache)
        self._budget_bytes = 0
        self._is_warm = False  # whether a step was run
        self._is_settled = self._has_tier = True
        self._away = NOTHING_AWAY
        self._fresh: list[StepKey] = []  # recorded, and not looked at since
        self.events: deque[str] = deque(maxlen=MOST_EVENTS)

    # When a step begins -----------------------------------------------------------------------------------------------

    def choose(
        self,
        key: StepKey,
        start_bytes: int,
        budget_bytes: int | None,
        *,
        is_settled: bool = True,
        has_tier: bool = True,
        away: Away = NOTHING_AWAY,
    ) -> tuple[Decision, Known]:
        """Decide how to run a step.

        Args:
            key: Its key.
            start_bytes: Bytes that are live before it.
            budget_bytes: The budget, or None if it is not known yet.
            is_settled: Whether wrappers of the models have arranged what they arrange in their first steps.
            has_tier: Whether the swap tier can be used. Without it, steps replay: plans that swap are not followed, and
                no step is recorded, as nothing is replayed then.
            away: What is away as it begins.
        """
        self._is_settled, self._has_tier, self._away = is_settled, has_tier, away
        if budget_bytes is not None:
            self._budget_bytes = budget_bytes
        self._take_answers()
        if budget_bytes is not None:
            self._plan_ahead(start_bytes, budget_bytes)
        known = self._known.find(key) or self._met(key)
        known.steps += 1
        known.decision = self._decision(key, known, start_bytes, budget_bytes)
        if known.decision == "record":
            self.requests.warm_up()
        elif not self._times.is_measuring:
            self._tell_moving(key, known)
        return known.decision, known

    def _tell_moving(self, key: StepKey, known: Known) -> None:
        """Tell what steps take with all that leaves and comes back in each of them, unless that was told."""
        before, missing = known.told, self._times.missing(has_hooks=known.has_hooks)
        is_told = before is not None and before.missing == missing and (before.moving_ms or not self._times.moves)
        told = None if is_told else known.expected(known.decision, self._times.beside)
        if told is None:
            return
        known.told = replace(told, missing=missing)
        was_open = before is not None and MOVING in before.missing
        if told.moving_ms > _NOTED_SHARE * told.whole_ms or was_open:
            without, what, least = "", MOVING, ""
            if told.decision == "online":
                without, what, least = " without a plan", LEAVING, "at least "
            self._say_of(
                key,
                f"steps of {key.text}{without}: {what} takes {format_ms(told.moving_ms)} of "
                f"{format_ms(told.whole_ms)}, optimizer.step() included; predicted {least}"
                f"{slower_than(told.slowdown, 'without Pooch')}{f'; {missing}' if missing else ''}",
            )

    def most_start_bytes(self, key: StepKey, budget_bytes: int | None) -> int | None:
        """Return what may be live before a step for it to follow its plan. None: it has none, or does not follow it.

        Args:
            key: Its key.
            budget_bytes: The budget, or None if it is not known yet.
        """
        known = self._known.look(key)
        if known is None or known.plan is None or known.profile is None or budget_bytes is None:
            return None
        rise_bytes = known.plan.predicted_peak_bytes - known.profile.persistent_bytes
        return _followed_bytes(known, budget_bytes) - rise_bytes

    def choose_again(self, kind: QuietKind) -> bool:
        """Note a further step of a kind that runs in-core, unless it has to be chosen anew.

        Args:
            kind: What was chosen before.
        """
        known = kind.known
        if self.requests.have_come or self._known.forgotten != kind.forgotten or known.profile is not kind.profile:
            return False
        self.chose_again(kind, 1)
        return True

    @staticmethod
    def chose_again(kind: QuietKind, steps: int) -> None:
        """Note further steps of a kind that runs in-core."""
        kind.known.steps += steps
        kind.known.decision, kind.known.reason = "in-core", ""

    @property
    def forgotten(self) -> int:
        """How many kinds of steps were forgotten so far."""
        return self._known.forgotten

    def replays(self, key: StepKey, *, must_replay: bool = False) -> bool:
        """Whether an online step of a key that begins now records its ops, so that values can be replayed.

        Args:
            key: Its key.
            must_replay: Whether it should be able to whether that takes longer or not.
        """
        family = self._known.family(key)
        if family.is_compiled:
            return False
        return must_replay or family.ways.next_replays()

    def looks_at_ops(self, key: StepKey, models: Sequence[torch.nn.Module]) -> bool:
        """Whether it has to be seen which ops an online step has that begins now and records none.

        Where anything is compiled, none are looked at: it would be compiled anew.

        Args:
            key: Its key.
            models: The models, parts of which may be compiled.
        """
        family = self._known.family(key)
        return not family.is_compiled and family.ops.looks() and all(compiled_part(model) is None for model in models)

    def has_graphs(self, key: StepKey) -> bool:
        """Whether compiled graphs run in steps of a key, as far as it is known."""
        return self._known.family(key).is_compiled

    def is_compiled(self, key: StepKey, known: Known) -> None:
        """Note that compiled graphs run in a kind of steps, in which nothing is replayed from here on."""
        self._known.family(key).is_compiled = True
        known.has_no_plan()
        known.profile, known.reason = None, COMPILED_REASON

    def is_leaner_copied(self, key: StepKey) -> None:
        """Note that an online step passed the budget where values could be made again."""
        self._known.family(key).ways.only_copy()

    def online_took(self, key: StepKey, effort: Effort, step_ms: float, own_ms: float | None, *, replays: bool) -> None:
        """Note what an online step took: see `OnlineWays.took`."""
        self._known.family(key).ways.took(effort, step_ms, own_ms, replays=replays)

    def _decision(self, key: StepKey, known: Known, start_bytes: int, budget_bytes: int | None) -> Decision:
        family = self._known.family(key)
        target_bytes = _target_bytes(known, budget_bytes)
        if known.reason == OTHER_OPS:
            known.reason = ""
        if known.left_plan >= MOST_FAILURES and self._has_tier and not family.ops.differs:
            known.left_plan = 0
            known.lost_plans += 1
            if known.lost_plans > MOST_LOST_PLANS:
                return self._never_the_same(key, known)
            family.recording += 1
            return "record"
        if known.profile is None or budget_bytes is None:
            return self._unknown(key, known, family, start_bytes, target_bytes)
        more_bytes = start_bytes - known.profile.persistent_bytes
        if known.profile.peak_bytes + more_bytes <= target_bytes:
            known.reason = ""
            return "in-core"
        if family.ops.differs:
            if known.plan is not None:
                known.has_no_plan()
            known.reason = OTHER_OPS
            return "online"
        anchors = [KnownStep(key.sizes, known.profile)]
        if known.plan is not None and self._is_followed(known, start_bytes):
            knows_costs = not known.is_provisional or self.requests.knows_costs
            has_grown = target_bytes > LARGER * known.asked_bytes > 0  # as with state that has come since
            if (known.is_outdated or has_grown or (known.is_provisional and knows_costs)) and not known.is_pending:
                known.is_outdated = False
                self._ask(key, known, anchors, start_bytes, target_bytes)
            elif knows_costs and not (known.is_improved or known.is_pending) and known.lost_ms >= WORTH_MS:
                known.is_improved = True
                self.requests.ask_for_better(key, known, self._held_bytes)
            if self._has_tier or not (known.plan.schedule.host_bytes or known.needed_bytes):
                return "plan"
            known.reason = "the swap tier cannot be used now"
            return "online"
        self._ask(key, known, anchors, start_bytes, target_bytes)
        return "online"

    def _is_followed(self, known: Known, start_bytes: int) -> bool:
        """Whether there is a plan with room for a step that begins with so many bytes."""
        if known.plan is None or known.profile is None:
            return False
        more_bytes = start_bytes - known.profile.persistent_bytes
        return known.plan.predicted_peak_bytes + more_bytes <= _followed_bytes(known, self._budget_bytes)

    def _never_the_same(self, key: StepKey, known: Known) -> Decision:
        """Plan a kind of step no longer, of which none could follow any plan."""
        known.has_no_plan()
        known.profile, known.never_recorded = None, True
        known.reason = f"its ops differ from step to step: {MOST_LOST_PLANS + 1} plans could not be followed"
        self._say_of(key, f"steps of {key.text} run online: {known.reason}")
        return "online"

    def left_plan(self, key: StepKey, known: Known, *, has_other_sizes: bool) -> None:
        """Note that a step has left its plan.

        Where its ops are the same, as where an expert gets other numbers of tokens in each step, the plan says what
        leaves all the same, and what is larger than planned is made up for beneath it.

        Args:
            key: Its key.
            known: What is known of it.
            has_other_sizes: Whether it has done so since results of the same op had other sizes.
        """
        known.left_plan += 1
        if has_other_sizes and self._holds_beneath and known.table is not None and not known.has_any_sizes:
            known.has_any_sizes, known.left_plan = True, 0
            known.table = known.table.with_any_sizes()
            what = "sizes within them change from step to step, so their plan goes by their ops alone"
            self._say_of(key, f"steps of {key.text}: {what}, and what it keeps leaves where it was made for less")

    def _ask(
        self, key: StepKey, known: Known, anchors: Sequence[KnownStep], start_bytes: int, target_bytes: int
    ) -> None:
        self.requests.ask(key, known, anchors, start_bytes, target_bytes, self._held_bytes, self._away)

    @property
    def _held_bytes(self) -> int | None:
        """The budget, if it is held beneath a plan that needs more."""
        return self._budget_bytes if self._holds_beneath else None

    def _met(self, key: StepKey) -> Known:
        """Remember a kind of step that is new, or was forgotten."""
        known = self._found(key)
        is_first = not self._known.forgotten
        self._known.add(key, known)
        self._known.has_grown()
        if is_first and self._known.forgotten:
            kept = "" if self._cache is not None else "; with cache= their plans are kept on disk"
            self._say(f"{len(self._known)} kinds of steps are remembered, and the least recent ones forgotten{kept}")
        return known

    def _found(self, key: StepKey) -> Known:
        """Return what the cache has of a new kind of step, or its family."""
        cached = None if self._cache is None else self._cache.find(key)
        family = self._known.family(key)
        if cached is None:
            profile = family.recorded.get(key.sizes)
            return Known() if profile is None else Known(profile, "recorded")
        if cached.is_recorded:
            family.recording += key.sizes not in family.recorded
            family.add(key.sizes, cached.profile)
        table = None if cached.plan is None else ActionTable.of(cached.plan)
        origin = "cached" if cached.is_recorded else "cached, derived"
        known = Known(cached.profile, origin, plan=cached.plan, table=table, is_improved=True)
        if cached.plan is not None and self._holds_beneath and cached.plan.budget_bytes > self._budget_bytes > 0:
            self._needs_more(known, cached.plan.budget_bytes)
        return known

    def _plan_ahead(self, start_bytes: int, budget_bytes: int) -> None:
        """Have plans made for steps that were recorded, before they come again. The optimizer's state is there now."""
        fresh, self._fresh = self._fresh, []
        for key in fresh:
            known = self._known.look(key) or Known()
            profile, target_bytes = known.profile, _target_bytes(known, budget_bytes)
            if self._known.family(key).ops.differs:
                continue
            if profile is not None and profile.peak_bytes + start_bytes - profile.persistent_bytes > target_bytes:
                self._ask(key, known, [KnownStep(key.sizes, profile)], start_bytes, target_bytes)

    def may_record(self, key: StepKey, known: Known, models: Sequence[torch.nn.Module]) -> bool:
        """Whether a step that was to be recorded can be, rather than be the first one with compiled graphs.

        Args:
            key: Its key.
            known: What is known of it.
            models: The models, parts of which may be compiled.
        """
        if self.has_graphs(key) or all(compiled_part(model) is None for model in models):
            return True
        self._known.family(key).recording -= 1
        self.is_compiled(key, known)
        return False

    def _unknown(self, key: StepKey, known: Known, family: Family, start_bytes: int, target_bytes: int) -> Decision:
        """Decide how to run a step without a profile."""
        if family.is_compiled and known.steps == 1:
            return "online"  # it may have to be compiled first
        if known.never_recorded:
            return "online"
        has_to_count = not target_bytes and self._counts_peaks
        if has_to_count or (target_bytes and not (self._is_warm and self._is_settled)):
            self._is_warm = True
            self.requests.warm_up()  # a plan is asked for soon
            return "online"
        if not self._has_tier:
            return "online"
        is_wanted = family.recording < MOST_RECORDED or (known.cannot_derive and known.steps >= OFTEN)
        if is_wanted and not family.ops.differs and not self._has_smaller_without_plan(key, family, target_bytes):
            family.recording += 1
            return "record"
        if family.has_larger_that_fits(key.sizes, start_bytes, target_bytes):
            return "in-core"
        if family.ops.differs:
            known.reason = OTHER_OPS
        elif family.recorded and not known.cannot_derive:
            anchors = [KnownStep(sizes, profile) for sizes, profile in family.recorded.items()]
            self._ask(key, known, anchors, start_bytes, target_bytes)
        return "online"

    def _has_smaller_without_plan(self, key: StepKey, family: Family, target_bytes: int) -> bool:
        """Whether there is no plan within the bytes for a recorded step that is no larger in any size.

        Nor will there be one for this step then, and recording it would be in vain.
        """
        for sizes in family.smaller_than(key.sizes):
            known = self._known.look(StepKey(key.family, sizes))
            if known is not None and known.plan is None and known.minimum_bytes > target_bytes > 0:
                return True
        return False

    # Answers ----------------------------------------------------------------------------------------------------------

    def _take_answers(self) -> None:
        for arrival in self.requests.arrivals():
            request = arrival.request
            request.known.is_pending = False
            if self._known.look(request.key) is request.known:  # else it was forgotten meanwhile
                self._take(arrival)

    def _take(self, arrival: Arrival) -> None:
        key, known, answer = arrival.request.key, arrival.request.known, arrival.answer
        if answer.over_bytes > known.trial.least_over_bytes > 0:
            answer = replace(answer, plan=None)  # steps without a plan can do with less, and not even with the budget
        if (answer.minimum_bytes and known.trial.is_lost) or self._known.family(key).ops.differs:
            return
        is_followed = self._is_followed(known, arrival.request.job.persistent_bytes)  # also if it is made again in vain
        known.reason = known.reason if is_followed else answer.refusal
        known.is_provisional = arrival.is_provisional and answer.plan is not None
        known.has_hooks = arrival.has_hooks or not known.is_provisional
        if answer.profile is None:
            known.cannot_derive, known.minimum_bytes = known.profile is None, _NEVER if known.profile else 0
            self._say_of(key, f"steps of {key.text} run online: {answer.refusal}")
            return
        if known.profile is None:
            known.profile, known.origin, known.away_bytes = answer.profile, "derived", arrival.request.away_bytes
            self._known.has_grown()
        if answer.plan is not None:
            again = "" if known.plan is None else " again"
            table = arrival.table
            assert table is not None
            table = table if known.table is None else table.after(known.table)
            known.table = table.with_any_sizes() if known.has_any_sizes else table
            known.profile, known.plan = answer.profile, answer.plan
            known.moving_ms, known.needed_bytes, known.reason = 0.0, 0, ""
            known.staying_bytes = answer.staying_bytes or arrival.request.staying_bytes
            known.away_bytes = arrival.request.away_bytes
            if answer.minimum_bytes > self._budget_bytes:  # which may be larger than when it was asked for
                self._needs_more(known, answer.minimum_bytes)
                known.moving_ms = answer.moving_ms
            if arrival.request.job.away_bytes:
                self._times.measure_anew()
            missing = self._times.missing(has_hooks=known.has_hooks)
            told = known.expected("plan", self._times.beside)
            known.told = None if told is None else replace(told, missing=missing)
            how = described(answer.plan, known.slowdown, known.staying_bytes, known.away_bytes)
            more = f"; it {known.reason}" if known.reason else ""
            more += f"; {missing}" if missing else ""
            self._say_of(key, f"planned{again} for steps of {key.text}: {how}{more}")
        elif answer.refusal and not is_followed:
            known.minimum_bytes = answer.minimum_bytes or _NEVER
            if known.minimum_bytes <= self._budget_bytes:
                return  # it is asked for again without a reserve
            self._say_of(key, f"no plan for steps of {key.text}, so they run online: {answer.refusal}")

    def _needs_more(self, known: Known, needed_bytes: int) -> None:
        """Note that the plan of a step needs more than the budget."""
        known.needed_bytes = needed_bytes
        more = format_bytes(needed_bytes - self._budget_bytes)
        known.reason = f"needs {more} more than the budget, so activations that it keeps leave as well"

    def _say(self, text: str) -> None:
        self.events.append(text)
        self._tell(text)

    def _say_of(self, key: StepKey, text: str) -> None:
        """Tell what is decided for a kind of steps. Where there are many, as of random lengths, not of each of them."""
        family = self._known.family(key)
        if key.sizes in family.told or len(family.told) < MOST_TOLD:
            family.told.add(key.sizes)
            self._say(text)
            return
        self.events.append(text)
        if not family.is_rest_told:
            family.is_rest_told = True
            self._tell(
                f"such steps have come in more than {MOST_TOLD} sizes, now {key.text}: what is decided for further "
                "sizes is not told one by one, and is among the events of the summary"
            )

    # After a step -----------------------------------------------------------------------------------------------------

    def recorded(self, key: StepKey, known: Known, profile: Profile, calls: int) -> None:
        """Take the profile of a step that was recorded.

        The first steps of all are not like later ones: libraries load and choose their kernels, and wrappers arrange
        their buckets. One of them is only recorded where its peak has to be known and cannot be counted.

        Args:
            key: Its key.
            known: What was known of it.
            profile: The profile.
            calls: Number of calls of governed modules in it.
        """
        if not (self._is_warm and self._is_settled):  # only its bytes are of use
            self._is_warm = True
            self._known.family(key).recording -= 1
            return
        known.profile, known.origin, known.calls = profile, "recorded", calls
        known.has_no_plan()
        known.minimum_bytes, known.cannot_derive, known.trial = 0, False, Trial()
        self._known.family(key).add(key.sizes, profile)
        self._known.has_grown()
        self._fresh.append(key)

    def ended(
        self,
        key: StepKey,
        known: Known,
        decision: Decision,
        step_ms: float,
        over_bytes: int,
        own_ms: float | None = None,
    ) -> None:
        """Note how a step went that was complete and did not leave its plan.

        A plan that needs more than the budget is only followed as long as the budget is held all the same, or passed by
        no more than without a plan, and if its first steps take no longer than those without a plan.

        Args:
            key: Its key.
            known: What is known of it.
            decision: How it was run.
            step_ms: The time that it took.
            over_bytes: By how much it passed the budget; 0 or less: it did not.
            own_ms: What of its time Pooch took, or None if that is not known.
        """
        trial = known.trial
        if decision == "online":
            trial.online_ms.append(step_ms)
            if own_ms is not None:
                trial.online_own_ms.append(own_ms)
            trial.online_over_bytes.append(over_bytes)
        if decision != "plan" or not known.needed_bytes:
            return
        if over_bytes > trial.least_over_bytes:
            self._lose(key, known, f"a step exceeded the budget by {format_bytes(over_bytes)}")
        elif trial.is_slower(step_ms):
            self._lose(key, known, "its steps took longer than those without a plan")

    def _lose(self, key: StepKey, known: Known, why: str) -> None:
        """Follow a plan no longer that needs more than the budget."""
        known.trial.is_lost, known.minimum_bytes = True, known.needed_bytes
        more = format_bytes(known.needed_bytes - self._budget_bytes)
        known.has_no_plan()
        known.reason = f"the smallest plan needs {more} more than the budget, and {why}"
        self._say_of(key, f"steps of {key.text} run online again: {known.reason}")

    def saw_ops(self, key: StepKey, known: Known, ops: int) -> None:
        """Take what tells the ops of a complete step that was not recorded. Steps that all differ are not planned.

        Args:
            key: Its key.
            known: What is known of it.
            ops: What tells them; 0: nothing does.
        """
        differing = self._known.family(key).ops
        if ops:
            differing.saw(known.ops, ops)
        if differing.differs and not differing.is_told:
            differing.is_told = True
            why = "their ops differ from step to step, in equal sizes too"
            self._say(f"steps like those of {key.text} run online: {why}")

    def banned(self, known: Known, recipes: list[Hashable]) -> None:
        """Note that recipes of a step's plan gave other bits, so that it is planned again without them.

        Until then the plan is followed, and their values are copied.

        Args:
            known: What is known of the step.
            recipes: What the recipes are known by; others than those of its plan are of steps without one.
        """
        if known.table is None or known.profile is None:
            return
        values = {value for value in known.table.recomputed if known.table.copies.key(value) in recipes}
        if values:
            known.profile = without_replays(known.profile, values)
            known.is_outdated = True

    def cannot_record(self, known: Known) -> None:
        """Note that a kind of step has no profile, because its backward pass builds a graph of its own.

        It counts among the shapes of its family that are recorded: others will build one too, and up to there nothing
        of the step is replayed.
        """
        known.never_recorded = True
        known.reason = "its backward pass builds a graph of its own (create_graph=True)"

    def not_recorded(self, key: StepKey, known: Known) -> None:
        """Note that a step could not be recorded after all, as when no backward pass followed."""
        self._known.family(key).recording -= 1
        known.failed_records += 1
        known.never_recorded |= known.failed_records >= MOST_FAILURES

    # For the summary --------------------------------------------------------------------------------------------------

    @property
    def is_planning(self) -> bool:
        """Whether any plan is being made."""
        return any(known.is_pending for known in self._known.values()) and not self.requests.have_come

    @property
    def planning_s(self) -> float:
        """Time for which was planned beside training."""
        return self.requests.planning_s

    @property
    def plans(self) -> dict[StepKey, Plan]:
        """The plans that are in use, with the budget that is held: they are made for a little less."""
        self._take_answers()
        return {key: self._shown(known.plan) for key, known in self._known.items() if known.plan is not None}

    def _shown(self, plan: Plan) -> Plan:
        return replace(plan, budget_bytes=max(self._budget_bytes, plan.budget_bytes))

    def planned(self) -> Iterator[tuple[str, Profile, Plan]]:
        """The shapes, profile and plan of each kind of step that has one; the most frequent first."""
        self._take_answers()
        for key, known in sorted(self._known.items(), key=lambda item: -item[1].steps):
            if known.profile is not None and known.plan is not None:
                yield key.text, known.profile, self._shown(known.plan)

    def kept(self) -> Iterator[tuple[StepKey, Cached]]:
        """What a later run can begin with: each kind of step that has a plan."""
        self._take_answers()
        for key, known in self._known.items():
            if known.profile is not None and known.plan is not None:
                yield key, Cached(known.profile, known.plan, "derived" not in known.origin)

    def shapes(self) -> tuple[PlannedShape, ...]:
        """What is known, for the summary; the most frequent steps first."""
        rows = sorted(self._known.items(), key=lambda item: -item[1].steps)
        return tuple(known.shape(key) for key, known in rows)

    def close(self) -> None:
        """Plan no longer."""
        self.requests.close()

    def join(self) -> None:
        """Wait until no thread and no process plans, after `close`."""
        self.requests.join()


def _followed_bytes(known: Known, budget_bytes: int) -> int:
    """Return up to which peak a plan is followed. One that needs more than the budget may take its reserve too."""
    if not known.needed_bytes:
        return _target_bytes(known, budget_bytes)
    return known.needed_bytes + budget_bytes - int(PLANNED_SHARE * budget_bytes)


def _target_bytes(known: Known, budget_bytes: int | None) -> int:
    """Return what a step's plan may take: less than the budget, unless plans are only feasible in all of it."""
    if budget_bytes is None:
        return 0
    target_bytes = int(PLANNED_SHARE * budget_bytes)
    return budget_bytes if target_bytes < known.minimum_bytes <= budget_bytes else target_bytes
