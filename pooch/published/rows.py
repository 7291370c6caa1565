"""An experiment as data: its rows, the claims about their answers, and the answers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..workloads import Setting
from .papers import Known

Question = Literal["slowdown", "largest"]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: a question to each method.

    Attributes:
        key: unique within the experiment.
        title: for people.
        question: "slowdown": the step under the budget relative to the in-core step; "largest": the largest `grow` that
            fits into the budget, and its throughput.
        workload: what is trained.
        methods: by name, in the order of the columns.
        budget: as text, such as "15GiB". "slowdown" also takes a percentage of the in-core peak.
        hardware: name of a device model. "": the local device, on which plans are also trained.
        batch_size: of the workload. None: its default.
        settings: of the workload.
        grow: the setting that grows, for "largest".
        start: the first size to try, for "largest".
        most: the largest size to try, for "largest".
        quick: whether `--quick` includes the row.
    """

    key: str
    title: str
    question: Question
    workload: str
    methods: tuple[str, ...]
    budget: str
    hardware: str = ""
    batch_size: int | None = None
    settings: Mapping[str, Setting] = field(default_factory=dict)
    grow: str = "batch_size"
    start: int | None = None
    most: int | None = None
    quick: bool = False

    @property
    def is_measured(self) -> bool:
        """Whether plans are trained on the local device, not only simulated."""
        return not self.hardware


@dataclass(frozen=True, slots=True)
class Claim:
    """What the integer program has to reach in a row.

    Attributes:
        row: its key.
        quantity: "slowdown" must be at most `limit`; "largest" and "multiple" must be at least `limit`.
        limit: the number to reach.
        throughput: required share of the in-core throughput. 0: none is required.
        obstacle: why the claim fails, as far as we know.
    """

    row: str
    quantity: Literal["slowdown", "largest", "multiple"]
    limit: float
    throughput: float = 0.0
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Saving:
    """What changing one method into another saves, if the paper gives that instead of a slowdown.

    Attributes:
        base: the method before the change.
        changed: the method after it.
        of: "overhead": of the time lost compared with in-core; "time": of the step.
    """

    base: str
    changed: str
    of: Literal["overhead", "time"]


@dataclass(frozen=True, slots=True)
class Course:
    """A whole training, if the paper gives its hours: as many steps as it takes, at a row's time of a step.

    Attributes:
        title: for people.
        row: key of the row that gives the time of a step.
        steps: of the training.
        paper_hours: the paper's figure.
        known: how we know it, as for `PublishedFigure`.
    """

    title: str
    row: str
    steps: int
    paper_hours: float
    known: Known


@dataclass(frozen=True, slots=True)
class Experiment:
    """A published evaluation.

    Attributes:
        name: as typed on the command line.
        title: for people.
        about: what is reproduced, how, and under which assumptions.
        rows: simulated on the paper's hardware.
        measured: the same at a reduced size, on the local device.
        claims: about the answers of `ilp`.
        saving: the methods that the paper's figure compares, if it compares two.
        courses: whole trainings, to be compared with one another.
    """

    name: str
    title: str
    about: str
    rows: tuple[Row, ...]
    measured: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()
    saving: Saving | None = None
    courses: tuple[Course, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one method to one row. A field is None if it does not apply.

    Attributes:
        row: its key.
        method: its name.
        device: name of the device.
        modelled: whether times come from a device model.
        budget_bytes: what the step may use.
        fits: whether there is a plan.
        needs_bytes: the smallest budget known, if there is no plan.
        step_ms: predicted time of the planned step.
        in_core_step_ms: time of the in-core step.
        lower_bound_ms: of the plan.
        peak_bytes: predicted peak of the plan.
        in_core_peak_bytes: of the profile.
        status: of the plan.
        swapped_share: share of the bytes of activations that are swapped.
        recomputed_share: share of the bytes of activations that are recomputed.
        largest: the largest size that fits.
        in_core_largest: the largest size that fits in-core.
        items_per_s: throughput at `largest`.
        in_core_items_per_s: throughput at `in_core_largest`.
        curve: (size, items per s) of the planned sizes, ascending.
        profiles: number of sizes that were profiled.
        measured_peak_bytes: measured in training.
        measured_step_ms: measured in training.
        measured_plain_step_ms: of plain steps that took turns with the planned ones.
        measured_ratios: of each turn, the planned step by the plain step, in the order of measurement.
        measured_items_per_s: measured throughput at `largest`.
        measured_in_core_items_per_s: measured throughput at `in_core_largest`.
        answered_s: seconds that the answer took.
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
    measured_ratios: tuple[float, ...] = ()
    measured_items_per_s: float | None = None
    measured_in_core_items_per_s: float | None = None
    answered_s: float = 0.0

    @property
    def slowdown(self) -> float | None:
        """Time lost compared with the in-core step: 0.1 for 10%."""
        if self.step_ms is None or not self.in_core_step_ms:
            return None
        return self.step_ms / self.in_core_step_ms - 1

    @property
    def measured_slowdown(self) -> float | None:
        """The measured slowdown: the median over the turns, each of a planned and a plain step."""
        if self.measured_ratios:
            return statistics.median(self.measured_ratios) - 1
        if self.measured_step_ms is None or not self.measured_plain_step_ms:
            return None
        return self.measured_step_ms / self.measured_plain_step_ms - 1

    @property
    def measured_quartiles(self) -> tuple[float, float] | None:
        """Between which slowdowns the middle half of the turns lies."""
        if len(self.measured_ratios) < 2:
            return None
        low, _, high = statistics.quantiles(self.measured_ratios, n=4, method="inclusive")
        return low - 1, high - 1

    @property
    def least_slowdown(self) -> float | None:
        """The smallest slowdown that any plan can have."""
        if self.lower_bound_ms is None or not self.in_core_step_ms:
            return None
        return self.lower_bound_ms / self.in_core_step_ms - 1

    @property
    def multiple(self) -> float | None:
        """The largest size relative to the largest in-core size."""
        return self.largest / self.in_core_largest if self.largest and self.in_core_largest else None

    @property
    def relative_throughput(self) -> float | None:
        """Throughput at the largest size relative to that at the largest in-core size."""
        if self.items_per_s is None or not self.in_core_items_per_s:
            return None
        return self.items_per_s / self.in_core_items_per_s

    def largest_at(self, throughput: float) -> int | None:
        """Return the largest planned size with at least this share of the in-core throughput."""
        if not self.in_core_items_per_s:
            return None
        least = throughput * self.in_core_items_per_s
        return max((size for size, rate in self.curve if rate >= least), default=None)
