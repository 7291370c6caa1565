"""Results of benchmarks as JSON and Markdown, with what they were measured on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from pooch.ir.files import replace_file
from pooch.profiler.hardware import describe_device

Row = Mapping[str, object]


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


def earlier_results(name: str, folder: Path, measured_now: Sequence[str]) -> tuple[list[Row], list[Row]]:
    """Rows and raw results that NAME.json holds of other workloads than those measured now.

    So one workload can be measured again alone. Results of another machine or other versions do not go into one table
    with these: they are left out, and with them the file.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return [], []
    document = json.loads(path.read_text())
    if document["surroundings"] != json.loads(json.dumps(surroundings())):
        return [], []
    rows, raw = ([row for row in document[part] if row["workload"] not in measured_now] for part in ("rows", "results"))
    return rows, raw


def write_results(name: str, title: str, rows: Sequence[Row], raw: object, folder: Path) -> None:
    """Write NAME.json (everything) and NAME.md (the table), beside first, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    around = surroundings()
    document = {"title": title, "surroundings": around, "rows": rows, "results": raw}
    software = around["software"]
    assert isinstance(software, dict)
    told = ", ".join(f"{key} {value}" for key, value in software.items())
    text = f"# {title}\n\nMeasured on {around['name']}; {told}.\n\n{markdown_table(rows)}\n"
    replace_file(folder / f"{name}.json", json.dumps(document, indent=1).encode())
    replace_file(folder / f"{name}.md", text.encode())
