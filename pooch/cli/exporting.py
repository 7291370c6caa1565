"""`--export`: what `run` and `optimize` do with the trained model, and what they tell of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pooch.cli.options import refuse_overwriting

if TYPE_CHECKING:
    from pooch.session.exporting import ExportReport
    from pooch.workloads import Workload


class Exporting:
    """Exports a workload when it is trained; knows the last report.

    Args:
        path: the file to write, or None: nothing is exported.
        workload_name: as it was typed.
        force: overwrite the file.

    Raises:
        UsageError: the name is no name for it, or is taken.
        WorkloadError: a package is missing.
    """

    def __init__(self, path: Path | None, workload_name: str, *, force: bool) -> None:
        self._path = path
        self.report: ExportReport | None = None
        if path is not None:
            from pooch.session.exporting import check_export

            check_export(path, workload_name)
            refuse_overwriting(path, force)

    def __call__(self, workload: Workload) -> None:
        """Export, if that was asked for."""
        if self._path is not None:
            from pooch.session.exporting import export_trained

            self.report = export_trained(workload, self._path)

    def record(self) -> dict[str, object]:
        """For `--json`."""
        if self.report is None:
            return {}
        return {"export": asdict(self.report) | {"same": self.report.is_same}}

    def line(self) -> str | None:
        """For people."""
        report = self.report
        if report is None:
            return None
        return (
            f"wrote {report.path}: its {report.outputs} output(s) in onnxruntime differ by "
            f"{report.largest_difference:.1e} at most, {report.relative_difference:.1e} of the largest output "
            f"(tolerated: {report.tolerance:.0e})"
        )

    def refuse_different(self) -> None:
        """Outputs that differ by too much are an error."""
        if self.report is not None:
            from pooch.session.exporting import refuse_different

            refuse_different(self.report)
