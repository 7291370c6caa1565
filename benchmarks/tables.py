"""Writes results of benchmarks as JSON and Markdown, with the machine that they were measured on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pooch.ir.files import replace_file
from pooch.profiler.hardware import describe_device

Row = Mapping[str, object]
LAYOUT = 2  # of the results: since 2 they hold every sample, from which rows are computed


def tell(text: str) -> None:
    """Print progress to standard error; results go to standard output."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def surroundings(device_name: str = "cpu") -> dict[str, object]:
    """Return device, memory and versions, for the header of a result."""
    import torch

    return asdict(describe_device(torch.device(device_name)))


def markdown_table(rows: Sequence[Row]) -> str:
    """Format rows as a Markdown table, with the columns of the first row."""
    columns = list(rows[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def earlier_results(name: str, folder: Path, measured_now: Sequence[str]) -> list[dict[str, Any]]:
    """Return the raw results in NAME.json for workloads that are not measured now.

    This allows measuring a single workload again. Results from another machine, other versions or another layout do not
    belong into the same table and are left out.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    document = json.loads(path.read_text())
    alike = document["surroundings"] == json.loads(json.dumps(surroundings())) and document.get("layout") == LAYOUT
    return [result for result in document["results"] if result["workload"] not in measured_now] if alike else []


def write_results(
    name: str,
    title: str,
    rows: Sequence[Row],
    raw: object,
    folder: Path,
    more: Mapping[str, Sequence[Row]] | None = None,
) -> None:
    """Write NAME.json (everything) and NAME.md (the tables).

    Args:
        name: of both files.
        title: heading of the page.
        rows: the table, computed from `raw` alone.
        raw: all samples.
        folder: where the files are written.
        more: further tables computed from `raw`, by heading.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"title": title, "layout": LAYOUT, "surroundings": surroundings(), "rows": rows}
    if more:
        document["more"] = more
    document["results"] = raw
    replace_file(folder / f"{name}.json", json.dumps(document, indent=1).encode())
    replace_file(folder / f"{name}.md", results_page(document).encode())


def results_page(document: Mapping[str, Any]) -> str:
    """Return the text of NAME.md for the contents of NAME.json."""
    around = document["surroundings"]
    told = ", ".join(f"{key} {value}" for key, value in around["software"].items())
    parts = [f"# {document['title']}", f"Measured on {around['name']}; {told}.", markdown_table(document["rows"])]
    for heading, rows in document.get("more", {}).items():
        parts += [f"## {heading}", markdown_table(rows)]
    return "\n\n".join(parts) + "\n"
