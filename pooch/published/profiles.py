"""Cached profiles for rows: modelled on the paper's hardware, or measured on the local device."""

from __future__ import annotations

from ..api.batch_search.max_batch import SizedWorkload
from ..api.profiling import profile_workload
from ..devices import find_device
from ..ground.progress import Progress
from ..ir import Link, Profile
from ..workloads import WorkloadFactory
from .rows import Row

MOST_KEPT = 24  # a profile takes some megabytes


class Profiles:
    """Makes each profile once.

    Args:
        progress: called with a description of what is profiled.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._kept: dict[object, Profile] = {}
        self._link: Link | None = None  # of the local device, once measured

    def of(self, row: Row, size: int | None) -> Profile:
        """Return the profile of a row's workload at a size of its growing setting."""
        key = (row.workload, tuple(sorted(row.settings.items())), row.grow, size, row.hardware, row.question)
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = self._made(row, size)
        return self._kept[key]

    def _made(self, row: Row, size: int | None) -> Profile:
        self._progress(f"{row.title}: profiling at {size or 'its default size'}")
        if row.hardware:
            model = find_device(row.hardware)
            return profile_workload(self.factory(row, size), mode="fake", device_model=model, progress=self._progress)
        if row.question != "largest":
            return profile_workload(self.factory(row, size), mode="run", progress=self._progress)
        made = profile_workload(self.factory(row, size), mode="fake", link=self._link, progress=self._progress)
        self._link = made.link
        return made

    def sized(self, row: Row) -> SizedWorkload:
        """Return the row's workload, of which one setting can grow."""
        batch_size = row.batch_size if row.grow != "batch_size" else None
        return SizedWorkload(row.workload, row.grow, batch_size, settings=row.settings)

    def factory(self, row: Row, size: int | None) -> WorkloadFactory:
        """Return what builds the row's workload at a size."""
        settings, batch_size = dict(row.settings), row.batch_size
        if size is not None and row.grow == "batch_size":
            batch_size = size
        elif size is not None:
            settings[row.grow] = size
        return WorkloadFactory(row.workload, batch_size=batch_size, settings=settings)
