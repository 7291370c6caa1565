"""What a built-in workload is: its builder, its published sizes, and which settings make it bigger. Loads no model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from pooch.errors import UsageError, WorkloadError
from pooch.workloads.base import Workload
from pooch.workloads.settings import Setting

EXTRA = "pip install 'pooch-planner[models]'"
SMALL = "small"


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings under a name, `batch_size` among them; typed as `workload@name`.

    Attributes:
        name: as typed; "small" is the version for tests, which every built-in workload has.
        settings: keyword arguments of the builder.
        note: where the size stands, or what it is for.
    """

    name: str
    settings: Mapping[str, Setting]
    note: str


@dataclass(frozen=True, slots=True)
class Growth:
    """A setting that makes a step bigger. `step`: legal values are its multiples; `smallest`: the first of them."""

    setting: str
    step: int = 1
    smallest: int = 1


BATCH_SIZE = Growth("batch_size")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One built-in workload.

    Attributes:
        name: as typed on the command line.
        summary: one line for people.
        module: where its `build` function is.
        package: package of the `models` extra that it needs, or "".
        source: where the network was published.
        defaults: settings in which it differs from the builder's own defaults (several names may share a builder).
        growths: settings that make its step bigger; `batch_size` comes first.
        presets: named sizes.
    """

    name: str
    summary: str
    module: str
    package: str = ""
    source: str = ""
    defaults: Mapping[str, Setting] | None = None
    growths: tuple[Growth, ...] = (BATCH_SIZE,)
    presets: tuple[Preset, ...] = ()

    def function(self) -> Callable[..., Workload]:
        """Its builder; imports torch and the packages that it needs.

        Raises:
            WorkloadError: the extra package is not installed.
        """
        module = self._import()
        builder: Callable[..., Workload] = module.build
        return builder

    def preset(self, name: str) -> Preset:
        """The preset of that name.

        Raises:
            UsageError: there is none.
        """
        for preset in self.presets:
            if preset.name == name:
                return preset
        known = ", ".join(f"{self.name}@{preset.name}" for preset in self.presets) or "none"
        raise UsageError(f"workload {self.name!r} has no size {name!r}: there are {known}")

    def growth(self, setting: str) -> Growth:
        """How that setting grows.

        Raises:
            UsageError: it is none that makes the step bigger.
        """
        for growth in self.growths:
            if growth.setting == setting:
                return growth
        known = ", ".join(growth.setting for growth in self.growths)
        raise UsageError(f"workload {self.name!r} does not grow by {setting!r}: choose {known}")

    def _import(self) -> ModuleType:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            root = (error.name or "").partition(".")[0]
            if not self.package or root == "pooch":
                raise
            raise WorkloadError(
                f"workload {self.name!r} needs the package {root!r}, which is not installed: {EXTRA}"
            ) from error
