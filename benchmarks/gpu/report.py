"""The report of a run as JSON and Markdown. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.account import Result

TABLES = {
    "auto": "`pooch.auto` beside the ways of others",
    "links": "Links",
    "sizes": "Copies by size",
    "hooks": "Cost of hooks",
    "race": "Race test",
    "doctor": "`pooch doctor`",
}


def markdown_table(rows: Sequence[Mapping[str, object]]) -> str:
    """A table with every column that any row has, in order of appearance."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row.get(column, "")).replace("|", "/") for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def report_text(around: Mapping[str, Any], results: Sequence[Result], device: str, small: bool) -> str:
    """The whole page."""
    title = "On the GPU" if device == "cuda" else "Rehearsal on the CPU: says nothing about a GPU"
    parts = [_part_row(result) for result in results]
    sections = [f"# {title}{', small workloads' if small else ''}", _surroundings(around), markdown_table(parts)]
    rows = [row for result in results if result.name.startswith("workload:") for row in result.data.get("rows", ())]
    if rows:
        sections += ["## Workloads", markdown_table(rows)]
    for key, heading in TABLES.items():
        found = [row for result in results for row in result.data.get(key, ())]
        if found:
            sections += [f"## {heading}", markdown_table(found)]
    notes = [f"- {result.name}: {note}" for result in results for note in result.data.get("notes", ())]
    if notes:
        sections += ["## Notes", "\n".join(notes)]
    return "\n\n".join(sections) + "\n"


def _part_row(result: Result) -> dict[str, object]:
    took = "" if result.status == "not run" else f"{result.seconds:.0f} s"
    return {"part": result.name, "result": result.status, "why": result.why, "took": took}


def _surroundings(around: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in around["versions"].items())
    machine = "no CUDA device"
    if around["gpu"]:
        memory = around["device memory"] / 2**30
        machine = f"{around['device']} ({memory:.1f} GiB), driver {around['driver']}, CUDA {around['cuda']}, "
        machine += f"cuDNN {around['cudnn']}"
    changed = f" with {around['changed files']} changed files" if around["changed files"] else ""
    return (
        f"{machine}; {around['cpu cores']} CPU cores, {around['system']}. Python {around['python']}, {versions}. "
        f"Commit {around['commit']}{changed} (package source {around['source']}). {around.get('carried', '')}."
    )


def write_report(folder: Path, around: Mapping[str, Any], results: Sequence[Result], device: str, small: bool) -> None:
    """gpu.json (everything) and gpu.md, beside first, then renamed: there is a whole report at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "device": device,
        "small": small,
        "surroundings": around,
        "parts": [asdict(result) for result in results],
    }
    texts = {"gpu.json": json.dumps(document, indent=1), "gpu.md": report_text(around, results, device, small)}
    for name, text in texts.items():
        beside = folder / f"{name}.part"
        beside.write_text(text)
        beside.replace(folder / name)
