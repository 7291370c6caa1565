"""Writes docs/simulated_peaks.md from the rows that `tests.simulated_cuda.peaks` printed, once for each setting.

python -m tests.simulated_cuda python -m tests.simulated_cuda.peaks > default.jsonl
python -m tests.simulated_cuda --expandable-segments python -m tests.simulated_cuda.peaks > expandable.jsonl
python -m tests.simulated_cuda.peaks_table default.jsonl expandable.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pooch.ground.units import format_bytes
from tests.simulated_cuda.peaks import STEPS, Peak, Row, Trained

TABLE = Path(__file__).parents[2] / "docs" / "simulated_peaks.md"
HEAD = f"""# Predicted and measured peaks on the simulated device

Written by `tests/simulated_cuda/peaks_table.py`, whose first lines say how; do not edit. **These are bytes of
PyTorch's CUDA build on a simulated CUDA runtime, with cuDNN off. No GPU was there, and nothing here is a figure of
one:** cuDNN's workspaces are missing, and kernels computed nothing.

Every built-in workload, small, at a batch size at which tensors are large beside the caching allocator's
granularity, was profiled plainly ("run") and with its saved tensors moved away ("offload"), planned, and trained
for {STEPS} steps, with both settings of the allocator. "measured" is the highest peak of the steps after the first,
in which the optimizer makes its state.

- *Expandable segments* (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`): measured is what the allocator counts
  as allocated (`torch.cuda.max_memory_allocated`).
- *Default*: measured is what it was asked for (`requested_bytes.all.peak`). The allocated bytes stand beside it:
  they count large blocks whole that the cache happened not to split.

`tests/simulated_cuda/test_workloads.py` holds that no prediction is off by 0.5% or more, and that each plan keeps
its budget.
"""
COLUMNS = (
    "workload", "profile", "budget", "predicted", "measured, expandable segments", "off by", "predicted, default",
    "measured, default", "off by", "allocated, default", "swapped back", "ops replayed",
)  # fmt: skip


def read_rows(path: Path) -> dict[tuple[str, str, float], Row]:
    """Rows by workload, mode and share of the in-core peak.

    Args:
        path: File with a row in JSON on each line.
    """
    rows = [_row(json.loads(line)) for line in path.read_text().splitlines() if line.startswith("{")]
    return {(row.workload, row.mode, row.share): row for row in rows}


def _row(fields: dict[str, Any]) -> Row:
    trained = fields["trained"]
    peaks = {name: Peak(**trained[name]) for name in ("peak", "highest")}
    return Row(**{**fields, "trained": Trained(**{**trained, **peaks})})


def table(default: dict[tuple[str, str, float], Row], expandable: dict[tuple[str, str, float], Row]) -> str:
    """Both settings beside each other, as Markdown.

    Args:
        default: Rows of the allocator as it is.
        expandable: Rows with expandable segments.
    """
    lines = ["| " + " | ".join(COLUMNS) + " |", "| " + " | ".join("---" for _ in COLUMNS) + " |"]
    lines += ["| " + " | ".join(_cells(default[key], expandable[key])) + " |" for key in expandable]
    return "\n".join(lines) + "\n"


def _cells(default: Row, expandable: Row) -> list[str]:
    trained = expandable.trained
    return [
        expandable.workload,
        expandable.mode,
        f"{expandable.share:.0%}: {format_bytes(expandable.budget_bytes)}" if expandable.share else "plain training",
        format_bytes(expandable.predicted_bytes),
        format_bytes(trained.peak.allocated_bytes),
        f"{expandable.allocated_deviation:+.3%}",
        format_bytes(default.predicted_bytes),
        format_bytes(default.trained.peak.requested_bytes),
        f"{default.requested_deviation:+.3%}",
        format_bytes(default.trained.peak.allocated_bytes),
        format_bytes(trained.swapped_in_bytes),
        str(trained.recomputed_ops),
    ]


def summary(default: dict[tuple[str, str, float], Row], expandable: dict[tuple[str, str, float], Row]) -> str:
    """The largest deviation of each statistic.

    Args:
        default: Rows of the allocator as it is.
        expandable: Rows with expandable segments.
    """
    worst = {
        "expandable segments, allocated": max(abs(row.allocated_deviation) for row in expandable.values()),
        "default, requested": max(abs(row.requested_deviation) for row in default.values()),
        "default, allocated": max(abs(row.allocated_deviation) for row in default.values()),
    }
    told = "; ".join(f"{name}: {share:.3%}" for name, share in worst.items())
    return f"Largest deviation of {len(expandable)} trainings with each setting: {told}.\n"


def main() -> None:
    """The files are named on the command line."""
    default, expandable = (read_rows(Path(name)) for name in sys.argv[1:3])
    TABLE.write_text(f"{HEAD}\n{summary(default, expandable)}\n{table(default, expandable)}")


if __name__ == "__main__":
    main()
