"""`--export`: what `run` and `optimize` do with the trained model, and what they tell of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pooch.cli.options import refuse_overwriting
from pooch.errors import UsageError
from pooch.plugins import provided

if TYPE_CHECKING:
    from pooch.workloads import Workload


class ExportReport(Protocol):
    """What an exporter tells of the file that it wrote."""

    def record(self) -> dict[str, object]:
        """For `--json`."""

    def line(self) -> str:
        """For people."""

    def refuse_different(self) -> None:
        """Raise where the file does not compute what the model does."""


class Export:
    """Exports a workload once it is trained, if that was asked for.

    Args:
        path: the file to write, or None: nothing is exported.
        workload_name: as it was typed.
        force: overwrite the file.

    Raises:
        UsageError: no room exports to such a file, or the name is taken.
        WorkloadError: a package is missing.
    """

    def __init__(self, path: Path | None, workload_name: str, *, force: bool) -> None:
        self._export: Callable[[Workload], ExportReport] | None = None
        self._report: ExportReport | None = None
        if path is not None:
            self._export = _find_exporter(path)(path, workload_name)
            refuse_overwriting(path, force)

    def __call__(self, workload: Workload) -> None:
        """Export, if that was asked for."""
        if self._export is not None:
            self._report = self._export(workload)

    def record(self) -> dict[str, object]:
        """For `--json`; empty where nothing was exported."""
        return {} if self._report is None else {"export": self._report.record()}

    def line(self) -> str | None:
        """For people; None where nothing was exported."""
        return None if self._report is None else self._report.line()

    def refuse_different(self) -> None:
        """Outputs that differ by too much are an error."""
        if self._report is not None:
            self._report.refuse_different()


def _find_exporter(path: Path) -> Callable[[Path, str], Callable[[Workload], ExportReport]]:
    exporters = provided("exporters")
    if path.suffix not in exporters:
        known = ", ".join(exporters)
        raise UsageError(f"{path} does not end in {known}: --export takes the name of such a file")
    found: Callable[[Path, str], Callable[[Workload], ExportReport]] = exporters[path.suffix].load()
    return found
