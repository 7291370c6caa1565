"""Results of benchmarks as JSON and Markdown, with what they were measured on."""

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
LAYOUT = 2  # of the results: since 2 they hold every sample, and rows are made of nothing else


def tell(text: str) -> None:
    """Progress, beside the results that go to standard output."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()


def surroundings(device_name: str = "cpu") -> dict[str, object]:
    """Device, memory and versions, for the head of a result."""
    import torch

    return asdict(describe_device(torch.device(device_name)))


def markdown_table(rows: Sequence[Row]) -> str:
    """A Markdown table with the columns of the first row."""
    columns = list(rows[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def earlier_results(name: str, folder: Path, measured_now: Sequence[str]) -> list[dict[str, Any]]:
    """Raw results that NAME.json holds of other workloads than those measured now.

    So one workload can be measured again alone. Results of another machine, other versions or another layout do not go
    into one table with these: they are left out, and with them the file.
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
    """Write NAME.json (everything) and NAME.md (the tables), beside first, then renamed.

    Args:
        rows: the table, made of `raw` alone.
        raw: what was measured, sample by sample.
        more: further tables of `raw`, by heading.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"title": title, "layout": LAYOUT, "surroundings": surroundings(), "rows": rows}
    if more:
        document["more"] = more
    document["results"] = raw
    replace_file(folder / f"{name}.json", json.dumps(document, indent=1).encode())
    replace_file(folder / f"{name}.md", results_page(document).encode())


def results_page(document: Mapping[str, Any]) -> str:
    """What NAME.md has to be where NAME.json is this document."""
    around = document["surroundings"]
    told = ", ".join(f"{key} {value}" for key, value in around["software"].items())
    parts = [f"# {document['title']}", f"Measured on {around['name']}; {told}.", markdown_table(document["rows"])]
    for heading, rows in document.get("more", {}).items():
        parts += [f"## {heading}", markdown_table(rows)]
    return "\n\n".join(parts) + "\n"
