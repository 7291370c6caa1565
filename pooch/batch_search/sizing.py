"""The largest batch of a workload: profiles of each size that the search asks for, and training of what it found."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pooch.api.in_core import fits_in_core, unless_out_of_memory
from pooch.api.profiling import Mode, profile_workload
from pooch.batch_search.growing import CURVE_POINTS, largest_size
from pooch.batch_search.sizes import MaxBatch, MeasuredSize, SizePoint, Sizes
from pooch.errors import UsageError
from pooch.ir import Link, Plan, Profile, Region
from pooch.measure.training import applied, timed_step, train_steps
from pooch.progress import Progress, silent
from pooch.units import format_bytes
from pooch.workloads import Setting, workload_factory, workload_growth

if TYPE_CHECKING:
    from pooch.devices import DeviceModel
    from pooch.workloads import Workload

FIRST_BATCH = 8  # small enough for most, large enough that fixed costs do not hide what an item takes


@dataclass(frozen=True)
class SizedWorkload:
    """A workload of which one setting grows.

    Attributes:
        workload: a built-in name, `file.py:function`, or a function that returns a `Workload` and takes the setting.
        grow: the setting. settings: all others. device: None leaves it to the workload.
    """

    workload: str | Callable[..., Workload]
    grow: str = "batch_size"
    batch_size: int | None = None
    device: str | None = None
    settings: Mapping[str, Setting] | None = None

    def at(self, size: int) -> Callable[[], Workload]:
        """What builds it at one size."""
        settings = {**(self.settings or {})}
        batch_size = self.batch_size
        if self.grow == "batch_size":
            batch_size = size
        else:
            settings[self.grow] = size
        if isinstance(self.workload, str):
            return workload_factory(self.workload, batch_size=batch_size, device=self.device, settings=settings)
        asked = {"batch_size": batch_size, "device": self.device}
        return partial(self.workload, **settings, **{key: value for key, value in asked.items() if value is not None})

    def sizes(self, most: int | None = None) -> Sizes:
        """The legal sizes.

        Raises:
            UsageError: the setting does not make this workload bigger, or is given a value besides.
        """
        if self.grow in (self.settings or {}) or (self.grow == "batch_size" and self.batch_size is not None):
            raise UsageError(f"{self.grow} is what grows: leave out its own value, or grow another setting")
        if not isinstance(self.workload, str):
            return Sizes(self.grow, most=most)
        growth = workload_growth(self.workload, self.grow)
        if most is not None and most < growth.smallest:
            raise UsageError(f"the smallest {self.grow} of {self.workload} is {growth.smallest}: allow at least that")
        return Sizes(growth.setting, growth.smallest, growth.step, most)


class SizedProfiles:
    """Profiles of a workload at any size; the link is measured once.

    Args:
        sized: the workload. mode, device_model, progress: as in `profile_workload`.
    """

    def __init__(
        self, sized: SizedWorkload, mode: Mode, device_model: DeviceModel | None = None, progress: Progress = silent
    ) -> None:
        self._sized = sized
        self._mode = mode
        self._device_model = device_model
        self._progress = progress
        self._link: Link | None = None

    def __call__(self, size: int) -> Profile:
        """The profile at one size."""
        profile = profile_workload(
            self._sized.at(size),
            mode=self._mode,
            device_model=self._device_model,
            link=self._link if self._mode == "fake" else None,
            progress=self._progress,
        )
        self._link = profile.link
        return profile


def max_batch(
    workload: str | Callable[..., Workload],
    budget: int | str,
    *,
    grow: str = "batch_size",
    batch_size: int | None = None,
    device: str | None = None,
    settings: Mapping[str, Setting] | None = None,
    mode: Mode = "fake",
    device_model: DeviceModel | None = None,
    start: int | None = None,
    most: int | None = None,
    policy: str = "ilp",
    policy_options: Mapping[str, object] | None = None,
    host_budget: int | str | None = None,
    time_limit_s: float = 30.0,
    region: Region = "step",
    points: int = CURVE_POINTS,
    measure_steps: int = 0,
    progress: Progress = silent,
) -> MaxBatch:
    """The largest batch (volume, length, ...) of a workload that fits into a budget under a plan, with its throughput.

    Args:
        workload: a built-in name, `file.py:function`, or a function that returns a `pooch.Workload` and takes the grown
            setting as a keyword.
        budget: bytes, or a text such as "16GiB".
        grow: the setting that grows; legal values are those that the built-in workload names.
        batch_size, device, settings: of the workload, what does not grow.
        mode: how each size is profiled; "fake" takes no memory.
        device_model: hardware that is not here, for mode "fake".
        start: a size to begin with. most: none larger is asked for.
        policy, policy_options, host_budget, time_limit_s, region: as in `plan`.
        points: planned sizes of the throughput curve; 2: the two ends alone.
        measure_steps: train so many steps at the largest size, and plainly at the largest in-core size.
        progress: told what is being done.

    Raises:
        UsageError: an argument cannot be understood, or a modelled device would have to be measured.
        InfeasibleBudget: not even the smallest size fits.
        ProfileError, WorkloadError: a size cannot be built or profiled.
    """
    if measure_steps and device_model is not None:
        raise UsageError("a device that is only modelled cannot be measured: leave out the device model, or measuring")
    sized = SizedWorkload(workload, grow, batch_size, device, settings)
    result = largest_size(
        SizedProfiles(sized, mode, device_model, progress),
        sized.sizes(most),
        budget,
        start=FIRST_BATCH if start is None and grow == "batch_size" else start,
        policy=policy,
        policy_options=policy_options,
        host_budget=host_budget,
        time_limit_s=time_limit_s,
        region=region,
        points=points,
        progress=progress,
    )
    return with_measurements(result, sized.at, measure_steps, progress) if measure_steps else result


def with_measurements(
    result: MaxBatch, at: Callable[[int], Callable[[], Workload]], steps: int, progress: Progress = silent
) -> MaxBatch:
    """Really train at the largest size under its plan, and plainly at the largest in-core size, unless this device has
    less room than the budget, so that plain training does not fit.

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
    """Plain training; None where it does not fit into what the device has left, which is told."""
    from pooch.torchtools.training_state import model_device

    workload = factory()
    measured = None
    if fits_in_core(point.plan, workload):
        device = model_device(workload.model)
        measured = unless_out_of_memory(lambda: _measured(workload, point, None, steps, progress), device)
    if measured is None:
        needed = format_bytes(point.in_core_peak_bytes)
        progress(f"plain training at {point.size} is left out: it takes {needed}, which this device has not left")
    return measured


def _measured(workload: Workload, point: SizePoint, plan: Plan | None, steps: int, progress: Progress) -> MeasuredSize:
    from pooch.executor.engines.pinned import blocks_kept

    progress(f"training {'under the plan' if plan else 'plainly'} at {point.size}")
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
    )
