"""The largest batch, volume or sequence that fits into a budget, and the throughput on the way there.

Memory is nearly affine in the batch, so few sizes are looked at: two give a line, the line a guess, and the guess and
the next size are profiled and planned exactly (`bracketing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pooch.errors import InfeasibleBudget, UsageError
from pooch.ir import Device, Plan, Profile, Region
from pooch.session.bracketing import MOST_INDEX, largest_within
from pooch.session.planning import checked_region, smallest_budget
from pooch.session.planning import plan as make_plan
from pooch.units import parse_budget

if TYPE_CHECKING:
    import pandas

CURVE_POINTS = 5
REFINEMENTS = 2  # more sizes around the one with the best throughput
Progress = Callable[[str], None]
ProfileAt = Callable[[int], Profile]


def _silent(text: str) -> None:
    """Nobody is told."""


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
    """

    size: int
    items: int
    planned: bool
    peak_bytes: int
    step_ms: float
    predicted_peak_bytes: int
    predicted_step_ms: float

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


def largest_size(
    profile_at: ProfileAt,
    sizes: Sizes,
    budget: int | str,
    *,
    start: int | None = None,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget: int | str | None = None,
    time_limit_s: float = 30.0,
    region: Region = "step",
    points: int = CURVE_POINTS,
    progress: Progress = _silent,
) -> MaxBatch:
    """Search with whatever profiles a size.

    Args:
        profile_at: the profile at one size. sizes: the legal ones.
        budget: bytes, or a text such as "16GiB"; a share of a peak means nothing here.
        start: a size to begin with, such as one that is known to be in the right region (default: the smallest).
        policy, policy_options, host_budget, time_limit_s, region: as in `plan`.
        points: planned sizes of the curve, from the largest in-core size to the largest; 2 or more.
        progress: told what is being done.

    Raises:
        UsageError: the budget or the policy cannot be understood.
        InfeasibleBudget: not even the smallest size fits.
    """
    planning = _Planning(
        _absolute(budget, "budget"),
        policy,
        dict(policy_options or {}),
        None if host_budget is None else _absolute(host_budget, "host budget"),
        time_limit_s,
        checked_region(region),
    )
    return _Growing(profile_at, sizes, planning, progress).run(start, points)


@dataclass(frozen=True, slots=True)
class _Planning:
    """How every size is planned."""

    budget_bytes: int
    policy: str
    policy_options: Mapping[str, object]
    host_bytes: int | None
    time_limit_s: float
    region: Region


class _Growing:
    """One search; profiles, needs and plans are made once per size."""

    def __init__(self, profile_at: ProfileAt, sizes: Sizes, planning: _Planning, progress: Progress) -> None:
        self.sizes = sizes
        self.planning = planning
        self.progress = progress
        self._profile_at = profile_at
        self._profiles: dict[int, Profile] = {}
        self._points: dict[int, SizePoint | None] = {}
        self._refusals: dict[int, int] = {}

    def run(self, start: int | None, points: int) -> MaxBatch:
        first = self.sizes.index(start if start is not None else self.sizes.smallest)
        first = min(first, self.sizes.last_index)
        beginning = sorted({first, min(2 * first + 1, self.sizes.last_index)})
        in_core = largest_within(self._peak, self.planning.budget_bytes, beginning, most=self.sizes.last_index)
        beginning = sorted(self._profiles)[:1] if in_core is None else [self._lower_of(in_core), in_core]
        found = largest_within(self._need, self.planning.budget_bytes, beginning, most=self.sizes.last_index)
        largest = self._confirmed(found)
        curve = self._curve(largest, in_core, points)
        return self._result(curve, largest, in_core)

    def _lower_of(self, in_core: int) -> int:
        """A known size well below, so that two points make a line."""
        return min((index for index in self._profiles if index < in_core), default=in_core)

    def _profile(self, index: int) -> Profile:
        if index not in self._profiles:
            size = self.sizes.size(index)
            self.progress(f"profiling {self.sizes.setting} {size}")
            self._profiles[index] = self._profile_at(size)
        return self._profiles[index]

    def _peak(self, index: int) -> int:
        return self._profile(index).peak_bytes

    def _need(self, index: int) -> int:
        profile = self._profile(index)
        self.progress(f"looking for the smallest budget at {self.sizes.setting} {self.sizes.size(index)}")
        how = self.planning
        return smallest_budget(
            profile,
            policy=how.policy,
            policy_options=how.policy_options,
            host_budget=how.host_bytes,
            region=how.region,
        )

    def _confirmed(self, found: int | None) -> int:
        """The largest index with a plan: what was found, or beyond, where planning finds more than the search did.

        Raises:
            InfeasibleBudget: nothing fits.
        """
        low = -1 if found is None else found
        while low >= 0 and self._point(low) is None:  # only where the need is not monotone in the budget
            low -= 1
        step = 1
        while low + step <= self.sizes.last_index and self._point(low + step) is not None:
            low, step = low + step, 2 * step
        high = min(low + step, self.sizes.last_index + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._point(middle) is not None else (low, middle)
        if low < 0:
            raise InfeasibleBudget(self.planning.budget_bytes, self._refusals[0], self.planning.policy)
        return low

    def _point(self, index: int) -> SizePoint | None:
        if index not in self._points:
            self._points[index] = self._planned(index)
        return self._points[index]

    def _planned(self, index: int) -> SizePoint | None:
        profile, size, how = self._profile(index), self.sizes.size(index), self.planning
        try:
            plan = make_plan(
                profile, how.budget_bytes, policy=how.policy, policy_options=how.policy_options,
                host_budget=how.host_bytes, time_limit_s=how.time_limit_s, region=how.region,
                progress=lambda text, share: self.progress(f"{self.sizes.setting} {size}: {text}"),
            )  # fmt: skip
        except InfeasibleBudget as error:
            self._refusals[index] = error.minimum_bytes
            return None
        return SizePoint(
            size=size,
            items=profile.batch_size or (size if self.sizes.setting == "batch_size" else 1),
            in_core_peak_bytes=profile.peak_bytes,
            in_core_step_ms=profile.step_ms,
            peak_bytes=plan.predicted_peak_bytes,
            step_ms=plan.predicted_step_ms,
            lower_bound_ms=plan.lower_bound_ms,
            plan=plan,
        )

    def _curve(self, largest: int, in_core: int | None, points: int) -> tuple[SizePoint, ...]:
        """Sizes in equal ratios between the largest in-core one and the largest, then nearer to the best of them."""
        first = largest if in_core is None else min(in_core, largest)
        chosen = set(_spread(self.sizes, first, largest, max(2, points)))
        for index in sorted(chosen):
            self._point(index)
        for _ in range(REFINEMENTS if points > 2 else 0):
            middle = self._beside_best()
            if middle is None:
                break
            self._point(middle)
        return tuple(self._points[index] for index in self._fitting() if self._points[index])  # type: ignore[misc]

    def _fitting(self) -> list[int]:
        return sorted(index for index, point in self._points.items() if point is not None)

    def _beside_best(self) -> int | None:
        """The middle of the wider gap beside the size with the best throughput, or None where there is no gap."""
        fitting = self._fitting()
        best = max(range(len(fitting)), key=lambda place: self._throughput(fitting[place]))
        gaps = [(fitting[place], fitting[place + 1]) for place in (best - 1, best) if 0 <= place < len(fitting) - 1]
        low, high = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))
        return (low + high) // 2 if high - low > 1 else None

    def _throughput(self, index: int) -> float:
        point = self._points[index]
        return point.items_per_s if point is not None else 0.0

    def _result(self, curve: tuple[SizePoint, ...], largest: int, in_core: int | None) -> MaxBatch:
        point = self._points[largest]
        assert point is not None, "the largest size was planned"
        profile = self._profile(largest)
        refusal = self._refusals.get(largest + 1, 0)
        return MaxBatch(
            workload=profile.workload,
            policy=point.plan.policy,
            budget_bytes=self.planning.budget_bytes,
            device=profile.device,
            mode=profile.mode,
            sizes=self.sizes,
            largest=point,
            in_core=None if in_core is None else self._points[in_core],
            refused=(self.sizes.size(largest + 1), refusal) if refusal else (0, 0),
            curve=curve,
            profiles=len(self._profiles),
            plans=len(self._points),
        )


def _absolute(budget: int | str, name: str) -> int:
    """Bytes; there is no one peak that a percentage could be of.

    Raises:
        UsageError: it is a percentage, or does not parse.
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise UsageError(
            f"the {name} {budget!r} is a share, but every size has its own peak: give bytes, such as 16GiB"
        )
    return parse_budget(budget, 0, name=name)


def _spread(sizes: Sizes, first: int, last: int, points: int) -> Sequence[int]:
    low, high = sizes.size(first), sizes.size(last)
    return sorted({first, last, *(sizes.index(low * (high / low) ** (k / (points - 1))) for k in range(1, points - 1))})
