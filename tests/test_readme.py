"""What the README tells people to type works."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


PAGES = README + "".join((ROOT / "docs" / name).read_text() for name in ("tutorial.md", "how-to.md"))


def test_it_begins_with_installing_and_a_script_as_it_is() -> None:
    """What its snippets do is in test_snippets.py."""
    blocks = re.findall(r"```\w+\n(.*?)```", README, re.DOTALL)
    assert "pip install" in blocks[0]
    assert "pooch" not in blocks[1], "a training script knows nothing of Pooch"
    assert blocks[2].startswith("$ pooch exec ")
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 12


def test_every_command_line_parses() -> None:
    from pooch.cli.commands import cli

    lines = re.findall(r"^\$ pooch (.*?)(?:\s+#.*)?$", PAGES, re.MULTILINE)
    assert len(lines) >= 20
    for line in lines:
        name, *arguments = line.split()
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, line
        command.make_context(name, arguments)  # raises where an option is unknown or missing


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_make_targets_exist(target: str) -> None:
    assert f"$ make {target}" in README
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_it_is_short_and_says_at_once_which_gpu_figures_there_are() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert "plans at full size have no GPU figures yet" in " ".join(lines[:20])


def test_every_link_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
