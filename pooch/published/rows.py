"""What an experiment is, as data: rows to be answered, claims about the answers, and the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..workloads import Setting

Question = Literal["slowdown", "largest", "smallest"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: what is asked of each method.

    Attributes:
        key: unique within the experiment. title: for people.
        question: "slowdown": the step under the budget over the in-core step; "largest": the largest `grow` that fits
            into the budget, and its throughput; "smallest": the smallest budget.
        workload, batch_size, settings: what is trained. grow, start, most: for "largest".
        hardware: name of a device model; "": the device at hand, and what was planned is also trained there.
        budget: bytes or text; a percentage of the in-core peak for "slowdown" alone; "": for "smallest".
        methods: by name, in the order of columns.
        quick: belongs to the part that `--quick` takes.
    """

    key: str
    title: str
    question: Question
    workload: str
    methods: tuple[str, ...]
    budget: str = ""
    hardware: str = ""
    batch_size: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    grow: str = "batch_size"
    start: int | None = None
    most: int | None = None
    quick: bool = False

    @property
    def is_measured(self) -> bool:
        """On the device at hand, not in the simulator alone."""
        return not self.hardware


@dataclass(frozen=True, slots=True)
class Claim:
    """What the integer program has to reach in a row, and in what.

    Attributes:
        row: its key. quantity: "slowdown" (at most), or "largest", "multiple" (at least), or "peak_mb" (at most).
        limit: the number to reach. throughput: share of the in-core throughput that goes with it; 0: none is asked.
        obstacle: what stands in the way where it is not reached, as far as it was looked into.
    """

    row: str
    quantity: Literal["slowdown", "largest", "multiple", "peak_mb"]
    limit: float
    throughput: float = 0.0
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Saving:
    """What changing one method into another saves: the paper's figure where it is no slowdown.

    Attributes:
        base, changed: methods. of: "overhead": of the time lost over in-core; "time": of the step.
    """

    base: str
    changed: str
    of: Literal["overhead", "time"]


@dataclass(frozen=True, slots=True)
class Experiment:
    """A published evaluation.

    Attributes:
        name: as typed. title, about: for people; what is reproduced, how, and what had to be assumed.
        rows: simulated on the paper's hardware. measured: the same at a reduced size, on the device at hand.
        claims: about answers of `ilp`. saving: what the paper's figure is about, where it compares two methods.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    measured: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    saving: Saving | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one method makes of one row. None: not asked, or there is none.

    Attributes:
        row, method: which. device, modelled: where, and whether its times come from a device model.
        budget_bytes: 0 for "smallest". fits: there is a plan. needs_bytes: smallest budget known, where there is none,
            and for "smallest".
        step_ms, in_core_step_ms, lower_bound_ms, peak_bytes, in_core_peak_bytes: of the plan and its profile.
        status: of the plan. swapped_share, recomputed_share: of the activations' bytes.
        largest, in_core_largest: sizes. items_per_s, in_core_items_per_s: at these two.
        curve: (size, items per s) of planned sizes, ascending.
        profiles: sizes that were profiled on the way.
        measured_peak_bytes, measured_step_ms: as trained. measured_plain_step_ms: plain steps that took turns with it.
        measured_items_per_s, measured_in_core_items_per_s: for "largest".
        answered_s: seconds that it took.
    """

    row: str
    method: str
    device: str
    modelled: bool
    budget_bytes: int
    fits: bool
    needs_bytes: int | None = None
    step_ms: float | None = None
    in_core_step_ms: float | None = None
    lower_bound_ms: float | None = None
    peak_bytes: int | None = None
    in_core_peak_bytes: int | None = None
    status: str | None = None
    swapped_share: float | None = None
    recomputed_share: float | None = None
    largest: int | None = None
    in_core_largest: int | None = None
    items_per_s: float | None = None
    in_core_items_per_s: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    profiles: int | None = None
    measured_peak_bytes: int | None = None
    measured_step_ms: float | None = None
    measured_plain_step_ms: float | None = None
    measured_items_per_s: float | None = None
    measured_in_core_items_per_s: float | None = None
    answered_s: float = 0.0

    @property
    def slowdown(self) -> float | None:
        """Time lost over the in-core step: 0.1 for 10%."""
        if self.step_ms is None or not self.in_core_step_ms:
            return None
        return self.step_ms / self.in_core_step_ms - 1

    @property
    def measured_slowdown(self) -> float | None:
        """The same as trained."""
        if self.measured_step_ms is None or not self.measured_plain_step_ms:
            return None
        return self.measured_step_ms / self.measured_plain_step_ms - 1

    @property
    def least_slowdown(self) -> float | None:
        """No plan loses less."""
        if self.lower_bound_ms is None or not self.in_core_step_ms:
            return None
        return self.lower_bound_ms / self.in_core_step_ms - 1

    @property
    def multiple(self) -> float | None:
        """The largest size over the largest in-core size."""
        return self.largest / self.in_core_largest if self.largest and self.in_core_largest else None

    @property
    def relative_throughput(self) -> float | None:
        """Throughput at the largest size over that at the largest in-core size."""
        if self.items_per_s is None or not self.in_core_items_per_s:
            return None
        return self.items_per_s / self.in_core_items_per_s

    def largest_at(self, throughput: float) -> int | None:
        """The largest planned size with at least that share of the in-core throughput."""
        if not self.in_core_items_per_s:
            return None
        least = throughput * self.in_core_items_per_s
        return max((size for size, rate in self.curve if rate >= least), default=None)
