"""`--export`: writing the trained model of `pooch run` and `pooch optimize` to a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ..ground.errors import UsageError
from ..ground.plugins import provided

if TYPE_CHECKING:
    from ..workloads import Workload


class ExportReport(Protocol):
    """What an exporter says about the file that it wrote."""

    def record(self) -> dict[str, object]:
        """For `--json`."""

    def line(self) -> str:
        """For people."""

    def refuse_different(self) -> None:
        """Raise an error if the file does not compute what the model computes."""


class Export:
    """Exports a workload after its training, if there is a file to write.

    Args:
        path: the file to write. None: nothing is exported.
        workload_name: name of the workload on the command line.

    Attributes:
        report: on the written file. None: nothing was exported.

    Raises:
        UsageError: there is no exporter for such a file.
        WorkloadError: a package is missing.
    """

    def __init__(self, path: Path | None, workload_name: str) -> None:
        self._export: Callable[[Workload], ExportReport] | None = None
        self.report: ExportReport | None = None
        if path is not None:
            self._export = _find_exporter(path)(path, workload_name)

    def __call__(self, workload: Workload) -> None:
        """Export the workload, if there is a file to write."""
        if self._export is not None:
            self.report = self._export(workload)

    def record(self) -> dict[str, object]:
        """For `--json`; empty if nothing was exported."""
        return {} if self.report is None else {"export": self.report.record()}


def _find_exporter(path: Path) -> Callable[[Path, str], Callable[[Workload], ExportReport]]:
    exporters = provided("exporters")
    if path.suffix not in exporters:
        known = ", ".join(exporters)
        raise UsageError(f"{path} does not end in {known}: --export takes the name of such a file")
    found: Callable[[Path, str], Callable[[Workload], ExportReport]] = exporters[path.suffix].load()
    return found
