"""The table of faults names tests that exist, each in a row of a fault and a promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = [line for line in (ROOT / "docs" / "faults.md").read_text().splitlines() if line.startswith("| ")]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_each_fault_has_a_promise_and_a_test_that_exists() -> None:
    rows = [row for row in ROWS if row != "| fault | promise | test |"]
    assert len(rows) >= 40
    for row in rows:
        fault, promise, test = (cell.strip() for cell in row.strip("|").split(" | "))
        assert fault, row
        assert promise, row
        named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", test)
        assert named, row
        assert named[2] in names_in(ROOT / named[1]), row


def test_the_rules_of_native_libraries_are_told_where_they_are_kept() -> None:
    told = (ROOT / "SECURITY.md").read_text()
    for name in ("POOCH_CACHE_DIRECTORY", "POOCH_SPILL_DIRECTORY", "CXX", "pooch-planner", "SHA-256"):
        assert name in told


def test_both_pages_can_be_found() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "(SECURITY.md)" in readme
    assert "(docs/faults.md)" in readme
    assert "faults.md" in (ROOT / "mkdocs.yml").read_text()
