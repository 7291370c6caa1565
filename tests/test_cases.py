"""Tests that docs/cases.md names exist, and run on the simulated CUDA device where it says so."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.device_parts import EITHER_DEVICE

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "cases.md").read_text()


def rows() -> list[list[str]]:
    """Cells of the rows that are a case: no heads, no headings of groups."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| **")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def named_in(row: list[str]) -> list[tuple[str, str]]:
    """(file, function) of each test that a row names."""
    return re.findall(r"`([\w/]+\.py)::(test_\w+)(?:\[[^`]*\])?`", row[2])


@cache
def marks(file: str) -> dict[str, str]:
    """For each test of a file, the source of its decorators and of the file's own marks."""
    tree = ast.parse((TESTS / file).read_text())
    own = "".join(
        ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    )
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    parameters = "mark.gpu" if "pytest.param('cuda', marks=pytest.mark.gpu)" in ast.unparse(tree) else ""
    return {
        f.name: own + "".join(map(ast.unparse, f.decorator_list)) + ("DEVICES" in ast.unparse(f)) * parameters
        for f in functions
    }


def runs_on_the_simulated_device(file: str, name: str) -> bool:
    """Whether `python -m tests.simulated_cuda.suite` runs a test with its tensors there."""
    found = marks(file)[name]
    if "mark.slow" in found:
        return False
    return "mark.gpu" in found or (f"tests/{file}" in EITHER_DEVICE and "mark.cpu" not in found)


def test_every_case_names_a_test_and_every_named_test_exists() -> None:
    assert len(rows()) > 40
    for row in rows():
        assert len(row) == 4, row
        assert named_in(row) or row[2].startswith("none"), row
        for file, name in named_in(row):
            assert f"def {name}(" in (TESTS / file).read_text(), f"{file}::{name}"
    assert "…" not in PAGE, "a test is named in full"


def test_what_is_said_to_run_on_the_simulated_device_does() -> None:
    for row in rows():
        runs = [runs_on_the_simulated_device(*each) for each in named_in(row)]
        assert row[3] == ("all" if runs and all(runs) else "some" if any(runs) else "-"), row
