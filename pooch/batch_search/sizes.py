"""What a search for the largest size is about, and what it found: frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pooch.batch_search.bracketing import MOST_INDEX
from pooch.ir import Device, Plan

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Sizes:
    """Legal values of the grown setting: `smallest`, and from there on in steps of `step`, up to `most`."""

    setting: str = "batch_size"
    smallest: int = 1
    step: int = 1
    most: int | None = None

    def size(self, index: int) -> int:
        """The legal value at that place in the row."""
        return self.smallest + index * self.step

    def index(self, size: float) -> int:
        """The place of the largest legal value that is not above `size`; 0 where there is none."""
        return max(0, int((size - self.smallest) // self.step))

    @property
    def last_index(self) -> int:
        """The last place that is ever asked for."""
        return MOST_INDEX if self.most is None else self.index(self.most)


@dataclass(frozen=True, slots=True)
class SizePoint:
    """One size, profiled, and planned under the budget.

    Attributes:
        size: value of the grown setting. items: batch items per step (1 where nobody knows).
        in_core_peak_bytes, in_core_step_ms: of the profile.
        peak_bytes, step_ms: of the plan. lower_bound_ms: no plan is faster. plan: the plan itself.
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
        """The planned step over the in-core one."""
        return self.step_ms / self.in_core_step_ms

    @property
    def items_per_s(self) -> float:
        """Throughput under the plan."""
        return 1000 * self.items / self.step_ms


@dataclass(frozen=True, slots=True)
class MeasuredSize:
    """One size as it was really trained: under the plan, or plainly.

    Attributes:
        size, items: as in `SizePoint`. planned: under its plan. peak_bytes: the highest of all steps.
        step_ms: median. predicted_peak_bytes, predicted_step_ms: what was told before.
        reserved_bytes: the most that a caching allocator took; None on a CPU.
        rounding_bytes: the part of the peak that it handed out beyond what tensors asked for.
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

    def is_within(self, budget_bytes: int) -> bool:
        """Whether the peak is at most the budget, but for the allocator's rounding."""
        return self.peak_bytes - self.rounding_bytes <= budget_bytes

    @property
    def items_per_s(self) -> float:
        """Measured throughput."""
        return 1000 * self.items / self.step_ms


@dataclass(frozen=True, slots=True)
class MaxBatch:
    """What fits into a budget, and how fast it is.

    Attributes:
        workload, policy, budget_bytes, device: of whom, by whom, and where. mode: how sizes were profiled.
        sizes: the legal values of the grown setting.
        largest: the largest size that fits under a plan. in_core: the largest that fits without one, or None.
        refused: the next larger size, and the smallest budget it was seen to need (0, 0: no larger size was asked for).
        curve: all planned sizes, ascending; `in_core` and `largest` among them.
        profiles, plans: how many sizes were profiled, and how many were planned.
        measured: sizes that were really trained.
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

    @property
    def best(self) -> SizePoint:
        """The size with the best throughput of those that were planned, the smallest of equals."""
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

        rows = [
            {
                self.sizes.setting: point.size,
                "items": point.items,
                "in_core_peak_bytes": point.in_core_peak_bytes,
                "peak_bytes": point.peak_bytes,
                "in_core_step_ms": point.in_core_step_ms,
                "step_ms": point.step_ms,
                "items_per_s": point.items_per_s,
                "slowdown": point.slowdown,
            }
            for point in self.curve
        ]
        return pandas.DataFrame(rows).set_index(self.sizes.setting)
