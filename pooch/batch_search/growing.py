"""The largest batch, volume or sequence that fits into a budget, and the throughput on the way there.

Memory is nearly affine in the batch, so few sizes are looked at: two give a line, the line a guess, and the guess and
the next size are profiled and planned exactly (`bracketing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pooch.api.planning import checked_region, smallest_budget
from pooch.api.planning import plan as make_plan
from pooch.batch_search.bracketing import largest_within
from pooch.batch_search.sizes import MaxBatch, SizePoint, Sizes
from pooch.errors import InfeasibleBudget
from pooch.ir import Profile, Region
from pooch.progress import Progress, silent
from pooch.units import absolute_bytes

CURVE_POINTS = 5
REFINEMENTS = 2  # more sizes around the one with the best throughput
ProfileAt = Callable[[int], Profile]


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
    progress: Progress = silent,
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
        absolute_bytes(budget, "budget"),
        policy,
        dict(policy_options or {}),
        None if host_budget is None else absolute_bytes(host_budget, "host budget"),
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


def _spread(sizes: Sizes, first: int, last: int, points: int) -> Sequence[int]:
    low, high = sizes.size(first), sizes.size(last)
    return sorted({first, last, *(sizes.index(low * (high / low) ** (k / (points - 1))) for k in range(1, points - 1))})
