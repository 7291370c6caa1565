"""Search for the largest size that fits into a budget under a plan, and plan sizes on the way for a throughput curve.

Memory is nearly affine in the size, so the line search profiles and plans few sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...ground.errors import InfeasibleBudget
from ...ground.progress import Progress, silent
from ...ir import Profile
from ..budgets import parse_budget
from ..options import PlanOptions
from ..planning import plan_with
from ..smallest import smallest_with
from .line_search import largest_within
from .results import MaxBatch, SizePoint, Sizes

CURVE_POINTS = 5
REFINEMENTS = 2  # more sizes around the one with the best throughput
ProfileAt = Callable[[int], Profile]


def largest_size(
    profile_at: ProfileAt,
    sizes: Sizes,
    budget: float | str,
    options: PlanOptions = PlanOptions(region="step"),  # noqa: B008 - frozen
    *,
    start: int | None = None,
    points: int = CURVE_POINTS,
    progress: Progress = silent,
) -> MaxBatch:
    """Find the largest size that fits.

    Args:
        profile_at: gives the profile at one size.
        sizes: the legal sizes.
        budget: bytes, or a text such as "16GiB"; a percentage is an error, since there is no single peak.
        options: how each size is planned.
        start: size to begin with, such as one that is close to the answer. None: the smallest.
        points: number of planned sizes between the largest in-core size and the largest, both included; 2 or more.
        progress: called with what is being done.

    Raises:
        UsageError: the budget or an option is invalid.
        InfeasibleBudget: not even the smallest size fits.
    """
    budget_bytes = budget if isinstance(budget, int) else parse_budget(budget, None)
    if options.host_budget is not None:
        host_bytes = parse_budget(options.host_budget, None, name="host budget")
        options = replace(options, host_budget=host_bytes)
    return _Search(profile_at, sizes, budget_bytes, options, progress).run(start, points)


class _Search:
    """One search; each size is profiled, and planned, at most once."""

    def __init__(
        self, profile_at: ProfileAt, sizes: Sizes, budget_bytes: int, options: PlanOptions, progress: Progress
    ) -> None:
        self._profile_at = profile_at
        self._sizes = sizes
        self._budget_bytes = budget_bytes
        self._options = options
        self._progress = progress
        self._profiles: dict[int, Profile] = {}
        self._points: dict[int, SizePoint | None] = {}
        self._refusals: dict[int, int] = {}

    def run(self, start: int | None, points: int) -> MaxBatch:
        last = self._sizes.last_index
        first = min(self._sizes.index(start if start is not None else self._sizes.smallest), last)
        in_core = largest_within(self._peak, self._budget_bytes, sorted({first, min(2 * first + 1, last)}), most=last)
        if in_core is None:
            beginning = sorted(self._profiles)[:1]
        else:  # with a known index below, so that two points make a line
            beginning = [min((index for index in self._profiles if index < in_core), default=in_core), in_core]
        largest = self._confirmed(largest_within(self._need, self._budget_bytes, beginning, most=last))
        return self._result(self._curve(largest, in_core, points), largest, in_core)

    def _profile(self, index: int) -> Profile:
        if index not in self._profiles:
            size = self._sizes.size(index)
            self._progress(f"profiling {self._sizes.setting} {size}")
            self._profiles[index] = self._profile_at(size)
        return self._profiles[index]

    def _peak(self, index: int) -> int:
        return self._profile(index).peak_bytes

    def _need(self, index: int) -> int:
        profile = self._profile(index)
        self._progress(f"looking for the smallest budget at {self._sizes.setting} {self._sizes.size(index)}")
        return smallest_with(profile, self._options)

    def _confirmed(self, found: int | None) -> int:
        """The largest index with a plan: the one that was found, or a larger one if planning does better than its need.

        Raises:
            InfeasibleBudget: nothing fits.
        """
        low = -1 if found is None else found
        while low >= 0 and self._point(low) is None:  # only if the need is not monotone in the budget
            low -= 1
        step = 1
        while low + step <= self._sizes.last_index and self._point(low + step) is not None:
            low, step = low + step, 2 * step
        high = min(low + step, self._sizes.last_index + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._point(middle) is not None else (low, middle)
        if low < 0:
            raise InfeasibleBudget(self._budget_bytes, self._refusals[0], self._options.policy)
        return low

    def _point(self, index: int) -> SizePoint | None:
        if index not in self._points:
            self._points[index] = self._planned(index)
        return self._points[index]

    def _planned(self, index: int) -> SizePoint | None:
        profile, size = self._profile(index), self._sizes.size(index)

        def progress(text: str, share: float) -> None:
            self._progress(f"planning {self._sizes.setting} {size}: {text} ({share:.0%})")

        try:
            plan = plan_with(profile, self._budget_bytes, self._options, progress=progress)
        except InfeasibleBudget as error:
            self._refusals[index] = error.minimum_bytes
            return None
        return SizePoint(
            size=size,
            items=profile.batch_size or (size if self._sizes.setting == "batch_size" else 1),
            in_core_peak_bytes=profile.peak_bytes,
            in_core_step_ms=profile.step_ms,
            peak_bytes=plan.predicted_peak_bytes,
            step_ms=plan.predicted_step_ms,
            lower_bound_ms=plan.lower_bound_ms,
            plan=plan,
        )

    def _curve(self, largest: int, in_core: int | None, points: int) -> tuple[SizePoint, ...]:
        """Sizes in equal ratios between the largest in-core one and the largest, then some around the best of them."""
        first = largest if in_core is None else min(in_core, largest)
        for index in _spread(self._sizes, first, largest, max(2, points)):
            self._point(index)
        for _ in range(REFINEMENTS if points > 2 else 0):
            middle = self._beside_best()
            if middle is None:
                break
            self._point(middle)
        return tuple(point for _, point in self._fitting())

    def _fitting(self) -> list[tuple[int, SizePoint]]:
        return [(index, point) for index, point in sorted(self._points.items()) if point is not None]

    def _beside_best(self) -> int | None:
        """The middle of the wider gap beside the size with the best throughput; None if there is no gap."""
        fitting = self._fitting()
        best = max(range(len(fitting)), key=lambda place: fitting[place][1].items_per_s)
        gaps = [(fitting[i][0], fitting[i + 1][0]) for i in (best - 1, best) if 0 <= i < len(fitting) - 1]
        low, high = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))
        return (low + high) // 2 if high - low > 1 else None

    def _result(self, curve: tuple[SizePoint, ...], largest: int, in_core: int | None) -> MaxBatch:
        point = self._points[largest]
        assert point is not None, "the largest size was planned"
        profile = self._profile(largest)
        refusal = self._refusals.get(largest + 1, 0)
        return MaxBatch(
            workload=profile.workload,
            policy=point.plan.policy,
            budget_bytes=self._budget_bytes,
            device=profile.device,
            mode=profile.mode,
            sizes=self._sizes,
            largest=point,
            in_core=None if in_core is None else self._points[in_core],
            refused=(self._sizes.size(largest + 1), refusal) if refusal else (0, 0),
            curve=curve,
            profiles=len(self._profiles),
            plans=len(self._points),
        )


def _spread(sizes: Sizes, first: int, last: int, points: int) -> list[int]:
    low, high = sizes.size(first), sizes.size(last)
    return sorted({first, last, *(sizes.index(low * (high / low) ** (k / (points - 1))) for k in range(1, points - 1))})
