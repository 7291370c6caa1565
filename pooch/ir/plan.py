"""The plan: keep, swap or recompute for each activation, with reasons and predicted costs. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..ground.plugins import view
from ..ground.units import format_bytes
from ..ground.visible import one_line
from .files import Document
from .layout import StepLayout
from .persistent import PersistentPlan
from .profile import Profile, shown_name
from .schedule import Schedule
from .split import Split

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Choice = Literal["keep", "swap", "recompute"]
Region = Literal["model", "step"]
Bound = Literal["live", "arena"]
Decisions = Mapping[int, Choice]
_LONGEST_POLICY = 16  # of what `repr` shows


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one activation, and why.

    Attributes:
        value: id of the value in the profile.
        choice: "keep", "swap" or "recompute".
        label: of the value.
        size_bytes: of the value.
        copy_ms: time to copy it out and back.
        replay_ms: time to replay it from values that are kept or copied back; nan if it cannot be replayed.
        reason: one line, in numbers.
        keep_change_ms: change of the predicted step time if only this activation were kept instead. 0 for the choice
            made, inf if the budget does not allow it, None if it is impossible or was not simulated.
        swap_change_ms: the same if it were swapped.
        recompute_change_ms: the same if it were recomputed.
    """

    value: int
    choice: Choice
    label: str
    size_bytes: int
    copy_ms: float
    replay_ms: float
    reason: str
    keep_change_ms: float | None = None
    swap_change_ms: float | None = None
    recompute_change_ms: float | None = None


GRAPH = "compiled.graph"  # the name of the op that a compiled graph is: it makes what it saves


@dataclass(frozen=True, slots=True)
class ExpectedOp:
    """A forward op as the runtime expects it.

    Attributes:
        name: of the operator.
        fingerprint: as in the profile.
        writes: ids of the values that it makes; -1 for outputs without a decision.
        reads: ids of the values that it reads, which are at hand where the schedule runs it again. None: unknown.
    """

    name: str
    fingerprint: str
    writes: tuple[int, ...]
    reads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Plan(Document):
    """A self-contained plan, with its schedule and the fingerprints of the ops that it expects.

    Attributes:
        workload: name of the profiled workload.
        device_kind: kind of the profiled device.
        model_signature: of the profiled model.
        policy: that decided, with its parameters.
        region: "model": applied to calls of the model; "step": to `with run.step()`.
        budget_bytes: the budget (0: none was given).
        predicted_peak_bytes: from the simulator.
        predicted_step_ms: from the simulator.
        in_core_peak_bytes: of the profile.
        in_core_step_ms: of the profile.
        lower_bound_ms: no plan under this budget is faster in the simulator's model.
        gap: (predicted_step_ms - lower_bound_ms) / predicted_step_ms.
        status: "optimal" (gap at most 1%), "feasible", "heuristic" (from a heuristic policy), or "manual".
        notes: on the planning ("everything fits").
        choices: one `Decision` per activation, in forward order.
        schedule: what is executed.
        expected: forward ops of the region, in order.
        anchors: (slot, value ids) as in the profile.
        first_slot: slot of the first op in `expected`.
        planning_ms: wall time of planning.
        persistent_bytes: of the profile (0: unknown).
        bound: what the budget bounds: "live", the sum of live bytes, or "arena", the arena in which they lie.
        layout: the arena of the step, predicted from the schedule; None: it was not packed.
        gathered: parameters that replays read in storages that FSDP fills and empties, by id.
        from_gathered: recomputed values that are made from these, so that they cannot be made again at any time.
        microbatches_in_flight: forward passes at most whose backward pass has not ended; the predicted peak includes
            all of them, and each has room of its own in the swap tier.
        accumulates: whether gradients are expected before the step, as in the profile.
        splits: calls that run in slices under the plan. Ids and slots are then those of `Profile.split`.
        banned: recomputed values, by id, whose replays gave other bits in an earlier run; they are copied instead.
        persistent: what of parameters, buffers, gradients and the optimizer's state leaves in each step; None: all of
            them stay.
    """

    format_name: ClassVar[str] = "pooch-plan"

    workload: str
    device_kind: str
    model_signature: str
    policy: str
    region: Region
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_step_ms: float
    in_core_peak_bytes: int
    in_core_step_ms: float
    lower_bound_ms: float
    gap: float
    status: Literal["optimal", "feasible", "heuristic", "manual"]
    notes: tuple[str, ...]
    choices: tuple[Decision, ...]
    schedule: Schedule
    expected: tuple[ExpectedOp, ...]
    anchors: tuple[tuple[int, tuple[int, ...]], ...]
    first_slot: int
    planning_ms: float
    persistent_bytes: int = 0
    bound: Bound = "live"
    layout: StepLayout | None = None
    gathered: tuple[int, ...] = ()
    from_gathered: tuple[int, ...] = ()
    microbatches_in_flight: int = 1
    accumulates: bool = False
    splits: tuple[Split, ...] = ()
    banned: tuple[int, ...] = ()
    persistent: PersistentPlan | None = None

    @property
    def decisions(self) -> dict[int, Choice]:
        """{activation id: "keep" | "swap" | "recompute"}."""
        return {decision.value: decision.choice for decision in self.choices}

    @property
    def host_bytes(self) -> int:
        """Size of the swap tier, for all microbatches in flight and what else leaves."""
        moved_bytes = 0 if self.persistent is None else self.persistent.tier_bytes
        return self.schedule.host_bytes * self.microbatches_in_flight + moved_bytes

    def __repr__(self) -> str:
        budget = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        slowdown = f", {self.predicted_step_ms / self.in_core_step_ms:.3f}x" if self.in_core_step_ms else ""
        counts = Counter(each.choice for each in self.choices)
        choices = ", ".join(f"{choice} {counts[choice]:,}" for choice in ("keep", "swap", "recompute"))
        who = f"{shown_name(self.workload)} by {one_line(self.policy, _LONGEST_POLICY)}"
        return f"Plan({who}: {format_bytes(self.predicted_peak_bytes)}{budget}{slowdown}, {choices})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(view("plan_html")(self))

    def plot(self, profile: Profile, path: str | Path | None = None) -> Figure:
        """Draw live bytes over time, in-core and planned, and what the three streams do; needs matplotlib.

        Args:
            profile: what the plan was made for.
            path: a file to write the picture to (.png, .pdf or .svg). None: it is only returned.

        Returns:
            The figure, which a notebook shows.

        Raises:
            PlanMismatch: the plan was made for another profile.
            UsageError: the file ends in something else.
            FileFormatError: the file cannot be written.
        """
        figure: Figure = view("plan_figure")(self, profile, path)
        return figure

    def report(
        self, path: str | Path, profile: Profile, *, budgets: int | Sequence[int | str] = 9, time_limit_s: float = 30.0
    ) -> None:
        """Write one HTML page to look at the plan and to send it, as `pooch report` does; needs plotly.

        Args:
            path: the page to write.
            profile: what the plan was made for.
            budgets: other budgets to choose from on the page, each of which is planned: how many, or which. 0: none.
            time_limit_s: most seconds to plan for, for each of them.

        Raises:
            UsageError: plotly is not installed, or a budget cannot be understood.
            PlanMismatch: the plan was made for another profile.
            FileFormatError: the file cannot be written.
        """
        view("plan_page")(profile, self, path, budgets=budgets, time_limit_s=time_limit_s)

    def to_frame(self) -> pandas.DataFrame:
        """One row per activation in forward order with its decision and reason, indexed by `activation` (its id)."""
        import pandas

        changes = ["keep_change_ms", "swap_change_ms", "recompute_change_ms"]
        columns = ["value", "choice", "label", "size_bytes", "copy_ms", "replay_ms", *changes, "reason"]
        rows = [{name: getattr(decision, name) for name in columns} for decision in self.choices]
        frame = pandas.DataFrame(rows, columns=columns).set_index("value").rename_axis("activation")
        # Not simulated is nan. A plan without decisions has columns of the same types.
        return frame.astype({"size_bytes": "int64", **dict.fromkeys(changes, float)})
