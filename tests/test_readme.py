"""What the README tells people to type works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_python_examples_run_when_pasted_and_move_activations(tmp_path: Path) -> None:
    first, second = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for pasted in (first, second):
        assert len([line for line in pasted.splitlines() if line.strip()]) <= 11
    script = tmp_path / "pasted.py"
    held = "\nassert auto.summary().swapped_bytes + auto.summary().recomputed_ops > 0\n"
    moved = '\nassert set(plan.decisions.values()) != {"keep"}\nassert run.stats.mismatches == 0\n'
    script.write_text(first + held + second + moved)
    finished = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "RunStats" in finished.stdout


def test_every_command_line_parses() -> None:
    from pooch.cli.commands import cli

    lines = re.findall(r"^\$ pooch (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        name, *arguments = line.split()
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        command.make_context(name, arguments)  # raises where an option is unknown or missing


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_make_targets_exist(target: str) -> None:
    assert f"$ make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_it_is_short_and_says_at_once_that_there_is_no_gpu_figure() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert "no GPU figure exists" in " ".join(lines[:20])


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
