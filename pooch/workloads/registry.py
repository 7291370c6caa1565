"""Built-in workloads: their builders, their published sizes, and which settings make them larger."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..ground.errors import UsageError, WorkloadError
from ..ground.wording import did_you_mean
from .base import Workload
from .settings import Setting


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings with a name, selected as `workload@name`.

    Attributes:
        name: of the size; every built-in workload has the size "small" for tests.
        settings: keyword arguments of the builder, `batch_size` among them.
        note: where the size was published, or what it is for.
    """

    name: str
    settings: Mapping[str, Setting]
    note: str


@dataclass(frozen=True, slots=True)
class Growth:
    """A setting that makes a step larger.

    Attributes:
        setting: its name.
        step: distance between legal values.
        smallest: the smallest legal value.
    """

    setting: str
    step: int = 1
    smallest: int = 1


BATCH_SIZE = Growth("batch_size")


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A built-in workload.

    Attributes:
        name: on the command line.
        summary: one line.
        module: the module with its `build` function.
        package: the package of the `models` extra that it needs, or "".
        source: where the network was published.
        defaults: settings that differ from the defaults of the builder, which several workloads may share.
        growths: settings that make its step larger, `batch_size` first.
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
        """Import the builder with torch and the packages that it needs.

        Raises:
            WorkloadError: the extra package is not installed.
        """
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            root = (error.name or "").partition(".")[0]
            if not self.package or root == __package__.partition(".")[0]:
                raise
            raise WorkloadError(
                f"workload {self.name!r} needs the package {root!r}, which is not installed: pip install {root}"
            ) from error
        builder: Callable[..., Workload] = module.build
        return builder

    def preset(self, name: str) -> Preset:
        """The preset with a name.

        Raises:
            UsageError: there is none.
        """
        for preset in self.presets:
            if preset.name == name:
                return preset
        if not self.presets:
            raise UsageError(f"workload {self.name!r} has no named sizes: leave out '@{name}'")
        known = [f"{self.name}@{preset.name}" for preset in self.presets]
        raise UsageError(
            f"workload {self.name!r} has no size {name!r}: {did_you_mean(f'{self.name}@{name}', known, cutoff=0.8)}"
        )

    def growth(self, setting: str) -> Growth:
        """How a setting grows.

        Raises:
            UsageError: the setting does not make the step larger.
        """
        for growth in self.growths:
            if growth.setting == setting:
                return growth
        known = ", ".join(growth.setting for growth in self.growths)
        raise UsageError(f"workload {self.name!r} does not grow by {setting!r}: choose {known}")
