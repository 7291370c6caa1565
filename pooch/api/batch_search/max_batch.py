"""The largest batch of a workload: how the search profiles each size, and training at the sizes that it found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...ground.errors import UsageError
from ...ground.progress import Progress, silent
from ...ground.units import format_bytes
from ...ir import Link, Plan, Profile
from ...workloads import Setting, WorkloadFactory, workload_growth
from ..budgets import parse_budget
from ..in_core import fits_in_core, unless_out_of_memory
from ..measure.timing import timed_step
from ..measure.training import applied, train_steps
from ..options import plan_options
from ..profiling import Mode, profile_workload
from .results import MaxBatch, MeasuredSize, SizePoint, Sizes
from .search import CURVE_POINTS, largest_size

if TYPE_CHECKING:
    from ...devices import DeviceModel
    from ...workloads import Workload

FIRST_BATCH = 8  # small enough for most workloads, large enough that fixed costs do not hide the cost of an item


@dataclass(frozen=True)
class SizedWorkload:
    """A workload with a setting that grows; fields as `max_batch` takes them."""

    workload: str | Callable[..., Workload]
    grow: str = "batch_size"
    batch_size: int | None = None
    device: str | None = None
    settings: Mapping[str, Setting] | None = None

    def at(self, size: int) -> Callable[[], Workload]:
        """What builds the workload at one size."""
        arguments: dict[str, Any] = {"batch_size": self.batch_size, **(self.settings or {}), self.grow: size}
        if not isinstance(self.workload, str):
            given = {key: value for key, value in {"device": self.device, **arguments}.items() if value is not None}
            return partial(self.workload, **given)
        batch_size = arguments.pop("batch_size")
        return WorkloadFactory(self.workload, batch_size, self.device, arguments)

    def sizes(self, most: int | None = None) -> Sizes:
        """The legal sizes.

        Raises:
            UsageError: the setting does not make this workload larger, or also has a fixed value.
        """
        if self.grow in (self.settings or {}) or (self.grow == "batch_size" and self.batch_size is not None):
            raise UsageError(f"{self.grow} is the setting that grows: leave out its value, or grow another setting")
        if not isinstance(self.workload, str):
            return Sizes(self.grow, most=most)
        growth = workload_growth(self.workload, self.grow)
        if most is not None and most < growth.smallest:
            raise UsageError(f"the smallest {self.grow} of {self.workload} is {growth.smallest}: allow at least that")
        return Sizes(growth.setting, growth.smallest, growth.step, most)


def _profiles_of(
    sized: SizedWorkload, mode: Mode, device_model: DeviceModel | None, repeats: int, progress: Progress
) -> Callable[[int], Profile]:
    """What profiles the workload at one size; in mode "fake" the link is measured once."""
    link: Link | None = None

    def profile_at(size: int) -> Profile:
        nonlocal link
        profile = profile_workload(
            sized.at(size), mode=mode, device_model=device_model, link=link, repeats=repeats, progress=progress
        )
        link = profile.link if mode == "fake" else None
        return profile

    return profile_at


def max_batch(
    workload: str | Callable[..., Workload],
    budget: float | str,
    *,
    grow: str = "batch_size",
    batch_size: int | None = None,
    device: str | None = None,
    settings: Mapping[str, Setting] | None = None,
    mode: Mode = "fake",
    device_model: DeviceModel | None = None,
    start: int | None = None,
    most: int | None = None,
    points: int = CURVE_POINTS,
    measure_steps: int = 0,
    repeats: int = 1,
    progress: Progress | None = None,
    **planning: Any,
) -> MaxBatch:
    """Find the largest batch (volume, length, ...) of a workload that fits into a budget under a plan.

    Args:
        workload: a built-in name, `file.py:function`, or a function that returns a `pooch.Workload` and takes the
            setting that grows as a keyword argument.
        budget: bytes, or a text such as "16GiB". Fewer than 1024 bytes are refused.
        grow: the setting that grows; a built-in workload says which of its values are legal.
        batch_size: of the workload, if another setting grows.
        device: of the workload.
        settings: of the workload, without the one that grows.
        mode: how each size is profiled; "fake" takes no memory.
        device_model: device that need not be present, for mode "fake".
        start: size to begin with.
        most: no larger size is tried.
        points: number of planned sizes of the throughput curve; 2: only its two ends.
        measure_steps: number of steps to train at the largest size, and plainly at the largest in-core size.
        repeats: number of timed steps of each size, where steps are run to profile it.
        progress: called with what is being done.
        **planning: `policy`, `policy_options`, `host_budget`, `time_limit_s`, `region` (default: "step") and `explain`,
            as `pooch.plan` takes them.

    Raises:
        UsageError: an argument is invalid, or `measure_steps` is given for a modelled device.
        InfeasibleBudget: not even the smallest size fits.
        ProfileError: a size cannot be profiled.
        WorkloadError: a size cannot be built.
    """
    if measure_steps and device_model is not None:
        raise UsageError("a device that is only modelled cannot be measured: leave out the device model, or measuring")
    budget_bytes, progress = parse_budget(budget, None), progress or silent
    sized = SizedWorkload(workload, grow, batch_size, device, settings)
    result = largest_size(
        _profiles_of(sized, mode, device_model, repeats, progress),
        sized.sizes(most),
        budget_bytes,
        plan_options(**{"region": "step", **planning}),
        start=FIRST_BATCH if start is None and grow == "batch_size" else start,
        points=points,
        progress=progress,
    )
    return with_measurements(result, sized.at, measure_steps, progress) if measure_steps else result


def with_measurements(
    result: MaxBatch, at: Callable[[int], Callable[[], Workload]], steps: int, progress: Progress = silent
) -> MaxBatch:
    """Train at the largest size under its plan, and plainly at the largest in-core size if that fits on this device.

    Raises:
        PlanMismatch: the plan was made for another device.
    """
    measured: list[MeasuredSize] = []
    if result.in_core is not None:
        plain = _measured_plainly(at(result.in_core.size), result.in_core, steps, progress)
        measured += [plain] if plain is not None else []
    measured.append(_measured(at(result.largest.size)(), result.largest, result.largest.plan, steps, progress))
    return replace(result, measured=tuple(measured))


def _measured_plainly(
    factory: Callable[[], Workload], point: SizePoint, steps: int, progress: Progress
) -> MeasuredSize | None:
    """Plain training; None, and a line of progress, if the device has too little memory left."""
    from ...torchtools.training_state import model_device

    workload = factory()
    measured = None
    if fits_in_core(point.plan, workload):
        device = model_device(workload.model)
        measured = unless_out_of_memory(lambda: _measured(workload, point, None, steps, progress), device)
    if measured is None:
        needed = format_bytes(point.in_core_peak_bytes)
        progress(f"skipping plain training at {point.size}: it needs {needed}, and the device has less left")
    return measured


def _measured(workload: Workload, point: SizePoint, plan: Plan | None, steps: int, progress: Progress) -> MeasuredSize:
    from ...executor.engines.pinned import blocks_kept

    progress(f"training {'under the plan' if plan else 'without a plan'} at {point.size}")
    with blocks_kept():
        trained = train_steps(workload, plan, steps, progress)
        with applied(plan, workload) as run:
            samples_ms = [timed_step(workload, run) for _ in range(steps)]
    return MeasuredSize(
        size=point.size,
        items=point.items,
        planned=plan is not None,
        peak_bytes=trained.peak_bytes,
        reserved_bytes=trained.reserved_bytes,
        rounding_bytes=trained.rounding_bytes,
        step_ms=statistics.median(samples_ms),
        predicted_peak_bytes=point.peak_bytes if plan else point.in_core_peak_bytes,
        predicted_step_ms=point.step_ms if plan else point.in_core_step_ms,
        samples_ms=tuple(samples_ms),
    )
