"""The sizes that a batch search chooses from, and what it found: frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...ground.units import format_bytes
from ...ground.visible import one_line
from ...ir import Device, Plan
from .line_search import MOST_INDEX

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Sizes:
    """Legal values of the setting that grows.

    Attributes:
        setting: its name.
        smallest: the smallest legal value.
        step: distance between legal values.
        most: no larger value is tried. None: no limit.
    """

    setting: str = "batch_size"
    smallest: int = 1
    step: int = 1
    most: int | None = None

    def size(self, index: int) -> int:
        """The legal value at an index."""
        return self.smallest + index * self.step

    def index(self, size: float) -> int:
        """The index of the largest legal value that is not above `size`; 0 if there is none."""
        return max(0, int((size - self.smallest) // self.step))

    @property
    def last_index(self) -> int:
        """The last index to consider."""
        return MOST_INDEX if self.most is None else self.index(self.most)


@dataclass(frozen=True, slots=True)
class SizePoint:
    """One size, profiled and planned.

    Attributes:
        size: value of the setting that grows.
        items: batch items per step (1 if unknown).
        in_core_peak_bytes: of the profile.
        in_core_step_ms: of the profile.
        peak_bytes: as the plan predicts.
        step_ms: as the plan predicts.
        lower_bound_ms: no plan is faster.
        plan: the plan itself.
    """

    size: int
    items: int
    in_core_peak_bytes: int
    in_core_step_ms: float
    peak_bytes: int
    step_ms: float
    lower_bound_ms: float
    plan: Plan

    @property
    def slowdown(self) -> float:
        """The planned step time over the in-core one."""
        return self.step_ms / self.in_core_step_ms

    @property
    def items_per_s(self) -> float:
        """Throughput under the plan."""
        return 1000 * self.items / self.step_ms


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """One size that was trained.

    Attributes:
        size: value of the setting that grows.
        items: batch items per step.
        planned: whether it was trained under its plan.
        peak_bytes: the highest of all steps.
        step_ms: median of the steps.
        predicted_peak_bytes: of the plan, or of the profile for plain training.
        predicted_step_ms: of the plan, or of the profile for plain training.
        reserved_bytes: highest bytes that a caching allocator reserved; None on a CPU.
        rounding_bytes: the part of the peak that comes from the allocator rounding up.
        samples_ms: the times of the steps, in order.
    """

    size: int
    items: int
    planned: bool
    peak_bytes: int
    step_ms: float
    predicted_peak_bytes: int
    predicted_step_ms: float
    reserved_bytes: int | None = None
    rounding_bytes: int = 0
    samples_ms: tuple[float, ...] = ()

    def is_within(self, budget_bytes: int) -> bool:
        """Whether the peak without the allocator's rounding is within the budget."""
        return self.peak_bytes - self.rounding_bytes <= budget_bytes

    @property
    def items_per_s(self) -> float:
        """Measured throughput."""
        return 1000 * self.items / self.step_ms


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """The largest size that fits into a budget, and the throughput up to it.

    Attributes:
        workload: name of the workload.
        policy: that decided.
        budget_bytes: that all sizes were planned for.
        device: that sizes were profiled on, or modelled for.
        mode: how sizes were profiled.
        sizes: the legal values of the setting that grows.
        largest: the largest size that fits under a plan.
        in_core: the largest size that fits without a plan, or None.
        refused: the next larger size and the smallest budget found for it; (0, 0) if no larger size was tried.
        curve: all planned sizes in ascending order, `in_core` and `largest` among them.
        profiles: number of sizes that were profiled.
        plans: number of sizes that were planned.
        measured: sizes that were trained.
    """

    workload: str
    policy: str
    budget_bytes: int
    device: Device
    mode: str
    sizes: Sizes
    largest: SizePoint
    in_core: SizePoint | None
    refused: tuple[int, int]
    curve: tuple[SizePoint, ...]
    profiles: int
    plans: int
    measured: tuple[MeasuredSize, ...] = ()

    def __repr__(self) -> str:
        budget, setting = format_bytes(self.budget_bytes), self.sizes.setting
        in_core = "none" if self.in_core is None else self.in_core.size
        return (
            f"MaxBatch({one_line(self.workload)}, budget {budget}: {setting} {self.largest.size} by "
            f"{one_line(self.policy, 24)}, {in_core} without a plan)"
        )

    @property
    def best(self) -> SizePoint:
        """The planned size with the best throughput, and the smallest of equally good ones."""
        return max(self.curve, key=lambda point: (point.items_per_s, -point.size))

    @property
    def multiple(self) -> float | None:
        """The largest size over the largest in-core size."""
        return self.largest.size / self.in_core.size if self.in_core else None

    @property
    def relative_throughput(self) -> float | None:
        """Throughput of the largest size over that of the largest in-core size."""
        return self.largest.items_per_s / self.in_core.items_per_s if self.in_core else None

    def to_frame(self) -> pandas.DataFrame:
        """One row per planned size (pandas)."""
        import pandas

        columns = "in_core_peak_bytes", "peak_bytes", "in_core_step_ms", "step_ms", "items_per_s", "slowdown"
        rows = [
            {self.sizes.setting: point.size, "items": point.items, **{name: getattr(point, name) for name in columns}}
            for point in self.curve
        ]
        return pandas.DataFrame(rows).set_index(self.sizes.setting)
