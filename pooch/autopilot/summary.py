"""What happened under `pooch.auto`, in figures and in words."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import format_bytes

MOST_SHAPES = 12  # that are printed


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """One kind of step that was met.

    Attributes:
        shapes: Shapes of the call that begins it.
        origin: "recorded" from a step, "derived" from other shapes, or "unknown" as long as it is neither.
        decision: "in-core", "plan" or "online": how its steps run now.
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
class AutoSummary:
    """What happened so far under `pooch.auto`. `str()` gives the lines to print.

    Attributes:
        budget_bytes: The budget, or None before the first step if it is a share of that step's peak.
        steps: Number of steps, each a forward and a backward pass.
        steps_in_core: Steps for which nothing had to be done.
        steps_on_plan: Steps that followed a plan to the end.
        steps_online: Steps under the online policy, from the beginning or from where they left their plan.
        steps_recorded: Those of them that were recorded.
        steps_left_plan: Those of them that left a plan.
        peak_bytes: Highest measured peak of a forward and backward pass.
        between_peak_bytes: Highest measured peak between the passes, such as that of the optimizer's step.
        steps_over_budget: Number of steps whose measured peak was over the budget.
        lost_ms: Time lost against plain training, as far as the recorded op times tell.
        swapped_bytes: Bytes copied to the tier.
        recomputed_ops: Number of ops replayed.
        shapes: The kinds of steps that were met.
        events: What was planned, replanned or refused, in order, one line each.
    """

    budget_bytes: int | None
    steps: int
    steps_in_core: int
    steps_on_plan: int
    steps_online: int
    steps_recorded: int
    steps_left_plan: int
    peak_bytes: int
    between_peak_bytes: int
    steps_over_budget: int
    lost_ms: float
    swapped_bytes: int
    recomputed_ops: int
    shapes: tuple[PlannedShape, ...]
    events: tuple[str, ...]

    def __str__(self) -> str:
        if not self.steps:
            return "pooch: no step was run under the budget"
        budget = "unknown" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        held = f"{self.steps_over_budget} steps over it" if self.steps_over_budget else "never passed"
        lines = [
            f"pooch: {self.steps} steps: {self.steps_on_plan} on plan, {self.steps_online} online "
            f"({self.steps_recorded} recorded, {self.steps_left_plan} left a plan), {self.steps_in_core} in-core",
            f"pooch: highest peak {format_bytes(self.peak_bytes)}, budget {budget} ({held}); between the passes, as in "
            f"the optimizer's step, {format_bytes(self.between_peak_bytes)}",
            f"pooch: {format_bytes(self.swapped_bytes)} swapped, {self.recomputed_ops} ops replayed, about "
            f"{self.lost_ms / 1000:.1f} s lost",
        ]
        for shape in self.shapes[:MOST_SHAPES]:
            planned = ""
            if shape.predicted_peak_bytes is not None and shape.predicted_slowdown is not None:
                planned = (
                    f", predicted {format_bytes(shape.predicted_peak_bytes)} and {shape.predicted_slowdown:.2f} of the "
                    "plain time"
                )
            plain = "" if shape.in_core_peak_bytes is None else f", plainly {format_bytes(shape.in_core_peak_bytes)}"
            why = f" ({shape.reason})" if shape.reason else ""
            lines.append(f"pooch: {shape.shapes}: {shape.steps} steps, {shape.decision}{plain}{planned}{why}")
        if len(self.shapes) > MOST_SHAPES:
            rest = self.shapes[MOST_SHAPES:]
            lines.append(f"pooch: {len(rest)} other shapes: {sum(shape.steps for shape in rest)} steps")
        return "\n".join(lines)
