"""What happened under `pooch.auto`, in figures and in words."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..api.recompute import MadeAgain
from ..executor.statistics import RunStats
from ..executor.verification import NOTHING_VERIFIED, Verified
from ..ground.units import format_bytes, plural
from ..ground.wording import budget_verdict, in_all, slower, slower_than_predicted
from .loop_times import LEAVING, MOVING, Beside

Decision = Literal["in-core", "plan", "online", "record"]

MOST_SHAPES = 12  # that are printed
TENTH = 1.1  # by which times may differ from their prediction
FEW = 3  # steps, of which the first compare replays in full
_TOLD_MS = 50.0  # what is shorter would be told as 0.0 s


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """One kind of step that was met.

    Attributes:
        shapes: Shapes of the call that begins it.
        origin: "recorded" from a step, "derived" from other shapes, or "unknown" as long as it is neither.
        decision: "in-core", "plan", "left" (a plan that the last step has left) or "online": how its steps run now.
        steps: Number of its steps so far.
        in_core_peak_bytes: Predicted peak of plain training, or None if it is unknown.
        predicted_peak_bytes: Predicted peak under its plan, or None without one.
        predicted_slowdown: Predicted time under its plan over the plain time, or None without one.
        reason: Why it has no plan, or why the last one was made.
    """

    shapes: str
    origin: str
    decision: str
    steps: int
    in_core_peak_bytes: int | None
    predicted_peak_bytes: int | None
    predicted_slowdown: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened in all steps so far.

    Attributes:
        steps_in_core: Steps for which nothing had to be done.
        steps_on_plan: Steps that followed a plan to the end.
        steps_online: Steps under the online policy, from the beginning or from where they left their plan.
        steps_recorded: Those of them that were recorded.
        steps_left_plan: Those of them that left a plan.
        peak_bytes: Highest measured peak of a forward and backward pass.
        between_peak_bytes: Highest measured peak between the passes, such as that of the optimizer's step.
        steps_over_budget: Number of steps whose measured peak was over the budget.
        lost_ms: Time lost against plain training: in steps without a plan what Pooch took, in others what they took
            longer than the recorded times of their ops.
        steps_ms: Time of all steps.
        compared_ms: Time of those of which it is known what they have lost, at least.
        ms_on_plan: Time of the steps whose time was predicted with all that costs something, so that it can be compared
            with that: those that followed a plan to the end, and those in which parameters and state moved.
        plain_ms_on_plan: Time that these would take in plain training, as recorded.
        predicted_ms_on_plan: Time that was predicted of them.
        moving_ms: What of their time was moving parameters, gradients and state.
        predicted_moving_ms: What was predicted of that.
        swapped_bytes: Bytes copied to the tier.
        recomputed_ops: Number of ops replayed.
        ungoverned: Number of saved tensors and of calls that were left alone, since they cannot be watched.
    """

    steps_in_core: int = 0
    steps_on_plan: int = 0
    steps_online: int = 0
    steps_recorded: int = 0
    steps_left_plan: int = 0
    peak_bytes: int = 0
    between_peak_bytes: int = 0
    steps_over_budget: int = 0
    lost_ms: float = 0.0
    steps_ms: float = 0.0
    compared_ms: float = 0.0
    ms_on_plan: float = 0.0
    plain_ms_on_plan: float = 0.0
    predicted_ms_on_plan: float = 0.0
    moving_ms: float = 0.0
    predicted_moving_ms: float = 0.0
    swapped_bytes: int = 0
    recomputed_ops: int = 0
    ungoverned: int = 0

    @property
    def steps(self) -> int:
        """Number of steps, each a forward and a backward pass."""
        return self.steps_in_core + self.steps_on_plan + self.steps_online

    @property
    def in_words(self) -> str:
        """How many steps ran in which way, and the highest peak."""
        ways = {"on plan": self.steps_on_plan, "online": self.steps_online, "in-core": self.steps_in_core}
        parts = ", ".join(f"{count} {way}" for way, count in ways.items() if count)
        peak = f"; peak {format_bytes(self.peak_bytes)}" if self.peak_bytes else ""
        return f"{plural(self.steps, 'step')}{': ' if parts else ''}{parts}{peak}"

    def with_step(self, step: Counters) -> Counters:
        """Return the counters with those of one more step: sums, and the highest of peaks."""
        sums = {each.name: getattr(self, each.name) + getattr(step, each.name) for each in fields(Counters)}
        highest = {name: max(getattr(self, name), getattr(step, name)) for name in ("peak_bytes", "between_peak_bytes")}
        return Counters(**(sums | highest))

    def summary(self, **told: Any) -> AutoSummary:
        """Return them with what else is told: the fields that an `AutoSummary` adds."""
        return AutoSummary(**{each.name: getattr(self, each.name) for each in fields(Counters)}, **told)


@dataclass(frozen=True, slots=True)
class MovedKind:
    """What was copied of one kind of what outlives steps.

    Attributes:
        name: Of the kind, for people.
        out_bytes: To the tier.
        in_bytes: Back from it.
    """

    name: str
    out_bytes: int
    in_bytes: int


@dataclass(frozen=True, slots=True)
class Told:
    """What was predicted of the steps of a loop: forward pass, backward pass and the optimizer's step.

    Attributes:
        plain_ms: Time of a forward and backward pass without Pooch.
        step_ms: That with Pooch, and with all that moving what outlives steps takes.
        optimizer_ms: What optimizers compute, either way.
        moving_ms: What of `step_ms` is moving.
        decision: How such steps ran.
        missing: What it leaves out, in words, or "".
    """

    plain_ms: float
    step_ms: float
    optimizer_ms: float = 0.0
    moving_ms: float = 0.0
    decision: Decision = "plan"
    missing: str = ""

    @property
    def whole_ms(self) -> float:
        """Time of a step with Pooch."""
        return self.step_ms + self.optimizer_ms

    @property
    def whole_plain_ms(self) -> float:
        """That without Pooch."""
        return self.plain_ms + self.optimizer_ms

    @property
    def slowdown(self) -> float:
        """The first over the second."""
        return self.whole_ms / self.whole_plain_ms


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long the forward and backward pass of one step took, beside what was expected.

    Attributes:
        step_ms: Its time.
        plain_ms: That of plain training, as recorded; 0 if it is not known.
        moving_ms: What moving took in it.
        told: What was predicted, or None if nothing was, as while it is not known what hooks and moving cost.
    """

    step_ms: float
    plain_ms: float = 0.0
    moving_ms: float = 0.0
    told: Told | None = None


def counted(
    decision: Decision, left_plan: bool, stats: RunStats, peak_bytes: int, times: StepTimes, *, is_over_budget: bool
) -> Counters:
    """Return the counters of one step.

    Args:
        decision: How it ran.
        left_plan: Whether it left its plan.
        stats: What was counted while it ran.
        peak_bytes: Its measured peak.
        times: Its times.
        is_over_budget: Whether that is known to be over the budget.
    """
    follows = decision == "plan" and not left_plan
    told = None if left_plan else times.told
    is_lost = decision != "in-core" and times.plain_ms > 0
    # What steps without a plan take without Pooch is measured in each. The machine may be faster or slower by now.
    scale = times.plain_ms / told.plain_ms if told and decision == "online" else 1.0
    return Counters(
        steps_in_core=int(decision == "in-core"),
        steps_on_plan=int(follows),
        steps_online=int(decision in ("online", "record") or left_plan),
        steps_recorded=int(decision == "record"),
        steps_left_plan=int(left_plan),
        peak_bytes=peak_bytes,
        steps_over_budget=int(is_over_budget),
        lost_ms=max(times.moving_ms, times.step_ms - times.plain_ms if is_lost else 0.0),
        steps_ms=times.step_ms,
        compared_ms=times.step_ms if decision == "in-core" or times.plain_ms > 0 or times.moving_ms > 0 else 0.0,
        ms_on_plan=times.step_ms if told else 0.0,
        plain_ms_on_plan=scale * told.whole_plain_ms if told else 0.0,
        predicted_ms_on_plan=scale * told.whole_ms if told else 0.0,
        moving_ms=times.moving_ms if told else 0.0,
        predicted_moving_ms=scale * told.moving_ms if told else 0.0,
        swapped_bytes=stats.swapped_out_bytes,
        recomputed_ops=stats.recomputed_ops,
        ungoverned=stats.ungoverned,
    )


def between(taken: Beside, *, is_compared: bool) -> Counters:
    """Return the counters of what optimizers took after a step.

    Args:
        taken: What they took.
        is_compared: Whether the step is compared with what was predicted, among which that is.
    """
    whole_ms = taken.optimizer_ms + taken.moving_ms
    compared = Counters(ms_on_plan=whole_ms, moving_ms=taken.moving_ms) if is_compared else Counters()
    return compared.with_step(Counters(lost_ms=taken.moving_ms, steps_ms=whole_ms, compared_ms=whole_ms))


@dataclass(frozen=True, slots=True)
class AutoSummary(Counters):
    """What happened so far under `pooch.auto`. `str()` gives the lines to print.

    Attributes:
        budget_bytes: The budget, or None before the first step if it is a share of that step's peak.
        shapes: The kinds of steps that were met.
        events: What was planned, replanned or refused, in order, one line each.
        tier_bytes: The most bytes that this process has taken of the swap tier.
        tier_limit_bytes: The most that it may take: its share of the machine's host budget. None: no limit.
        local_ranks: Number of ranks that share the machine.
        verified: Which replays gave the same bytes as what they replaced.
        planning_s: Time for which was planned, in another process beside training.
        persistent: What of parameters, gradients, buffers and optimizers' state was copied out and back.
        around_slices_ms: How long steps of optimizers took longer, as what they work on had to be brought in and out.
        staying: Why some of it cannot leave, and how many bytes that are.
        before_bytes: Bytes that were live before the budget was held.
        before_peak_bytes: The most that had been live until then, where somebody counted: `pooch exec` does.
        is_followed: Whether the budget is what is free, so that earlier steps may have had another one.
        made_again: What compiled graphs make again, where that is allowed.
        is_verbose: Whether `str()` also tells what Pooch did inside of the steps.
    """

    budget_bytes: int | None = None
    shapes: tuple[PlannedShape, ...] = ()
    events: tuple[str, ...] = ()
    tier_bytes: int = 0
    tier_limit_bytes: int | None = None
    local_ranks: int = 1
    verified: Verified = NOTHING_VERIFIED
    planning_s: float = 0.0
    persistent: tuple[MovedKind, ...] = ()
    around_slices_ms: float = 0.0
    staying: tuple[tuple[str, int], ...] = ()
    before_bytes: int = 0
    before_peak_bytes: int = 0
    is_followed: bool = False
    made_again: MadeAgain = field(default_factory=MadeAgain)
    is_verbose: bool = False

    def __repr__(self) -> str:
        budget = "not known" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        return f"AutoSummary(budget {budget}, {self.in_words})"

    @property
    def totals(self) -> tuple[str, ...]:
        """What happened in all steps together, one line each; the first one is the verdict."""
        if not self.steps:
            return (_verdict(self),)
        lines = [_verdict(self), self._ways, self._peaks, self._work, *self._persistent]
        doubted = _doubt(self)
        if doubted is not None:
            lines.insert(1, doubted)
        if self.made_again.graphs:
            lines.append(str(self.made_again))
        if self.ungoverned:
            lines.append(f"{self.ungoverned} saved tensors and calls were not governed, as they cannot be watched")
        if self.tier_limit_bytes is not None:
            limit = format_bytes(self.tier_limit_bytes)
            whole = f"{limit} for each of {self.local_ranks} ranks" if self.local_ranks > 1 else limit
            lines.append(f"swap tier: {format_bytes(self.tier_bytes)} taken, of {whole}")
        return (*lines, *self._internals) if self.is_verbose else tuple(lines)

    @property
    def _ways(self) -> str:
        in_core = f", {self.steps_in_core} in-core" if self.steps_in_core else ""
        return f"{plural(self.steps, 'step')}: {self.steps_on_plan} on plan, {self.steps_online} online{in_core}"

    @property
    def _peaks(self) -> str:
        known = [shape.in_core_peak_bytes for shape in self.shapes if shape.in_core_peak_bytes is not None]
        more = " or more" if len(known) < len(self.shapes) else ""
        without = f"peak without Pooch {format_bytes(max(known))}{more}; " if any(known) else ""
        return f"{without}peak during optimizer.step() {format_bytes(self.between_peak_bytes)}"

    @property
    def _work(self) -> str:
        moved = f"{format_bytes(self.swapped_bytes)} swapped, {plural(self.recomputed_ops, 'op')} recomputed"
        if not self.compared_ms:
            return f"{moved}; what plain steps take is not known"
        return f"{moved}; about {self.lost_ms / 1000:.1f} s longer than plain steps"

    @property
    def _persistent(self) -> list[str]:
        """What outlives steps and has left the device."""
        moved = [
            f"{each.name} {format_bytes(each.out_bytes)} out and {format_bytes(each.in_bytes)} back"
            for each in self.persistent
            if each.out_bytes or each.in_bytes
        ]
        longer = f"; optimizer.step() took {self.around_slices_ms / 1000:.1f} s longer for it"
        told = longer if self.around_slices_ms >= _TOLD_MS else ""
        lines = ["left the device: " + ", ".join(moved) + told] if moved else []
        return [*lines, *(f"{format_bytes(size_bytes)} stay: {why}" for why, size_bytes in self.staying)]

    @property
    def _internals(self) -> tuple[str, ...]:
        ways = f"of the online steps, {self.steps_recorded} recorded and {self.steps_left_plan} that left a plan"
        compared = f"replays compared with what they replace: {self.verified}"
        return (ways,) if self.verified == NOTHING_VERIFIED else (ways, compared)

    def __str__(self) -> str:
        lines = list(self.totals)
        if self.steps:
            lines += [_of_shape(shape) for shape in self.shapes[:MOST_SHAPES]]
        if self.steps and len(self.shapes) > MOST_SHAPES:
            rest = self.shapes[MOST_SHAPES:]
            lines.append(f"{len(rest)} other shapes: {plural(sum(shape.steps for shape in rest), 'step')}")
        return "\n".join(f"pooch: {line}" for line in lines)


def _of_shape(shape: PlannedShape) -> str:
    how = {"plan": "on a plan", "left": "on a plan that the last one has left"}.get(shape.decision, shape.decision)
    line = f"{shape.shapes}: {plural(shape.steps, 'step')}, {how}"
    if shape.in_core_peak_bytes is not None:
        line += f"; peak without Pooch {format_bytes(shape.in_core_peak_bytes)}"
    if shape.predicted_peak_bytes is not None and shape.predicted_slowdown is not None:
        line += f", predicted {format_bytes(shape.predicted_peak_bytes)} and {slower(shape.predicted_slowdown)}"
    return line + (f" ({shape.reason})" if shape.reason else "")


def _verdict(summary: AutoSummary) -> str:
    """Whether the budget was held, the numbers are the same, and what it costs; only what is known."""
    if not summary.steps:
        return "no step was run under the budget"
    return "; ".join(part for part in (_budget(summary), _numbers(summary), _time(summary)) if part)


def _budget(summary: AutoSummary) -> str:
    budget_bytes, steps = summary.budget_bytes, summary.steps
    if budget_bytes is None:
        return f"Budget not known yet: peak {format_bytes(summary.peak_bytes)} {in_all(steps)}"
    if summary.is_followed:
        count = summary.steps_over_budget
        held = f"Budget exceeded in {count:,} of {plural(steps, 'step')}" if count else f"Budget held {in_all(steps)}"
        return f"{held}: peak {format_bytes(summary.peak_bytes)}, budget {format_bytes(budget_bytes)} by now"
    held = budget_verdict(summary.peak_bytes, budget_bytes, steps, summary.steps_over_budget)
    excepted = []
    if summary.between_peak_bytes > budget_bytes:
        over = format_bytes(summary.between_peak_bytes - budget_bytes)
        excepted.append(f"exceeded by {over} between them, as in optimizer.step()")
    before_bytes = max(summary.before_bytes, summary.before_peak_bytes)
    if before_bytes > budget_bytes:
        at_most = "" if before_bytes == summary.before_bytes else "up to "
        excepted.append(f"{at_most}{format_bytes(before_bytes)} were live before the first")
    return f"{held}, {'and' if summary.steps_over_budget else 'but'} {', and '.join(excepted)}" if excepted else held


def _numbers(summary: AutoSummary) -> str:
    verified, differences = summary.verified, summary.verified.differences
    if differences:
        return f"{plural(len(differences), 'replay')} gave other numbers"
    if summary.made_again.graphs:
        return "compiled graphs may round in another way"
    if verified.compared or verified.sampled:
        return "replays gave the same numbers"
    return "replays not compared" if summary.recomputed_ops else ""


def _time(summary: AutoSummary) -> str:
    if summary.steps_in_core == summary.steps and not summary.plain_ms_on_plan:
        fits = summary.budget_bytes is not None and not summary.steps_over_budget
        return "everything fits: you do not need a plan" if fits else ""
    compared_plain_ms = summary.compared_ms - summary.lost_ms
    if summary.ms_on_plan < summary.compared_ms / 2 and summary.steps_on_plan < summary.steps / 2:
        if compared_plain_ms <= 0:
            return ""
        ratio = summary.compared_ms / compared_plain_ms
        return f"steps {'at least ' if slower(ratio) != slower(1.0) else ''}{slower(ratio)}"
    if not summary.plain_ms_on_plan:
        if not summary.steps_on_plan:
            return "no step on a plan yet"
        what = f"what hooks and {MOVING} cost" if summary.around_slices_ms else "what hooks cost"
        so_far = f"steps about {slower(summary.compared_ms / compared_plain_ms)}" if compared_plain_ms > 0 else "steps"
        return f"{so_far}, which was not predicted, as {what} is still being measured"
    ratio = summary.ms_on_plan / summary.plain_ms_on_plan
    predicted = summary.predicted_ms_on_plan / summary.plain_ms_on_plan
    least = "at least " if _are_mostly_online(summary) else ""
    return f"{_compared(summary)} {least}{slower_than_predicted(ratio, predicted)}"


def _are_mostly_online(summary: AutoSummary) -> bool:
    """Whether most steps had no plan: what these lose is what Pooch was seen to take, which may not be all."""
    return summary.steps_online > summary.steps_on_plan + summary.steps_in_core


def _compared(summary: AutoSummary) -> str:
    """Of which steps more than budgets is predicted."""
    return "steps on a plan" if summary.steps_on_plan else "steps"


def _doubt(summary: AutoSummary) -> str | None:
    """That steps on a plan did not take what was predicted, and what that may come from, in one line, or None.

    What a step takes without Pooch is never measured under it: it is the sum of its ops' times as they were recorded.
    """
    if summary.steps < FEW or not summary.predicted_ms_on_plan:
        return None
    ratio = summary.ms_on_plan / summary.predicted_ms_on_plan
    if max(ratio, 1 / ratio) < TENTH:
        return None
    gap_ms, moving_gap_ms = (
        summary.ms_on_plan - summary.predicted_ms_on_plan,
        summary.moving_ms - summary.predicted_moving_ms,
    )
    if abs(moving_gap_ms) > abs(gap_ms) / 2 and moving_gap_ms * gap_ms > 0:
        took, told = (f"{each / 1000:.1f} s" for each in (summary.moving_ms, summary.predicted_moving_ms))
        why = f"{LEAVING if _are_mostly_online(summary) else MOVING} took {took} of it instead of {told}"
    elif ratio < 1:
        why = "ops took longer when the step was recorded, so steps may lose more against plain ones than is said"
    else:
        why = "hooks and copies cost more than was measured, or the machine is busier than when the step was recorded"
    return f"the prediction was not kept: {_compared(summary)} took {ratio:.2f}x what was predicted; {why}"
