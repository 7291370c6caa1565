"""What pages name in the repository exists: tests, files, modules, commands with their options, and public names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import pooch
from pooch.cli.commands import cli

ROOT = Path(__file__).parents[1]
# They name what there was in a run, and files of others.
RECORDS = {ROOT / "docs" / f"{name}.md" for name in ("engine_mutations", "results")}
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - RECORDS)
FOLDERS = "pooch|tests|benchmarks|examples|notebooks|packaging|profiles"


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@cache
def options_of(command: str) -> set[str] | None:
    """The options of a command, or None if there is no such command."""
    found = cli.get_command(click.Context(cli), command)
    return None if found is None else {name for each in found.params for name in (*each.opts, *each.secondary_opts)}


def missing_tests(text: str) -> Iterator[str]:
    for file, test in re.findall(r"`([\w/]+\.py)::(test_\w+)", text):
        path = ROOT / "tests" / file.removeprefix("tests/")
        if not path.exists() or test not in functions_of(path):
            yield f"{file}::{test}"


def missing_files(text: str) -> Iterator[str]:
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)`", text):
        if not path.startswith("pooch/") or "." in path:
            yield from () if any(ROOT.glob(path.rstrip("/"))) else (path,)
    for module in re.findall(r"-m ((?:benchmarks|tests)(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        yield from () if path.with_suffix(".py").exists() or (path / "__main__.py").exists() else (module,)


def missing_commands(text: str) -> Iterator[str]:
    """Commands with their options, up to the end of a line or of a piece of code."""
    joined = text.replace("\\\n", " ")
    for command, rest in re.findall(r"(?:`|\$ )pooch ([a-z][a-z-]*)([^`\n#]*)", joined):
        options = options_of(command)
        if options is None:
            yield f"pooch {command}"
        elif command != "exec":  # whose script has options too
            yield from (f"pooch {command} {o}" for o in re.findall(r"(?<=\s)--[a-z][\w-]*", rest) if o not in options)


def missing_names(text: str) -> Iterator[str]:
    for name in re.findall(r"`(?:[^`\n]*[ (])?pooch\.(\w+)\(", text):
        yield from () if hasattr(pooch, name) else (f"pooch.{name}",)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    looks = (missing_tests, missing_files, missing_commands, missing_names)
    assert [name for look in looks for name in look(text)] == []


def test_what_does_not_exist_is_noticed() -> None:
    assert list(missing_tests("`tests/test_pages.py::test_nothing`")) == ["tests/test_pages.py::test_nothing"]
    assert list(missing_files("`pooch/colours.py`, `python -m benchmarks.nothing`")) == [
        "pooch/colours.py",
        "benchmarks.nothing",
    ]
    assert list(missing_commands("$ pooch plan p.json --fast\n`pooch explain`")) == [
        "pooch plan --fast",
        "pooch explain",
    ]
    assert list(missing_names("`pooch.explain(plan)`")) == ["pooch.explain"]
