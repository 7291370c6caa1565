"""The built-in workloads: names, what they are, and the extra packages they need. Importing this loads no model."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from pooch.errors import WorkloadError
from pooch.workloads.base import Workload

EXTRA = "pip install 'pooch-planner[models]'"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One built-in workload.

    Attributes:
        name: as typed on the command line.
        summary: one line for people.
        module: where its `build` function is.
        package: package of the `models` extra that it needs, or "".
    """

    name: str
    summary: str
    module: str
    package: str = ""

    def function(self) -> Callable[..., Workload]:
        """Its builder; imports torch and the packages that it needs.

        Raises:
            WorkloadError: the extra package is not installed.
        """
        module = self._import()
        builder: Callable[..., Workload] = module.build
        return builder

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


BUILT_IN: dict[str, BuiltIn] = {
    entry.name: entry
    for entry in (
        BuiltIn("resnet50", "ResNet-50, images 224x224, SGD with momentum", "pooch.workloads.resnet50"),
        BuiltIn("gpt2", "GPT-2 small language model, AdamW", "pooch.workloads.gpt2", "transformers"),
        BuiltIn("unet3d", "3D U-Net for volumes 96x96x96, Adam", "pooch.workloads.unet3d", "monai"),
        BuiltIn("lstm", "three-layer LSTM language model, Adam", "pooch.workloads.lstm"),
    )
}
