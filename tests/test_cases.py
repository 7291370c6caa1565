"""Tests that docs/cases.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text()


def rows() -> list[list[str]]:
    """Cells of the rows that are a case: no heads, no headings of groups."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| **")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_case_names_a_test_and_every_named_test_exists() -> None:
    assert len(rows()) > 40
    for row in rows():
        assert len(row) == 3, row
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)(?:\[[^`]*\])?`", row[2])
        assert named or row[2].startswith("none"), row
        for file, name in named:
            assert f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"
    assert "…" not in PAGE, "a test is named in full"
