"""What a file holds is shown, and never obeyed by the terminal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pooch.api.planning import plan_from_decisions
from pooch.cli import main
from pooch.visible import visible
from tests.toys import blocks

EVIL = "name\x1b]0;owned\x07\x1b[2J\u202etext\x9b31m[red]x[/]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ä, 漢字 and \u00a0", "plain, ä, 漢字 and \u00a0"),
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\r\x00\x9b\u202e", "\\r\\x00\\x9b\\u202e"),
    ],
)
def test_control_characters_are_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def is_harmless(text: str) -> bool:
    return not set(text) & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    profile = replace(blocks(3), workload=EVIL, notes=(EVIL,))
    profile = replace(profile, values=tuple(replace(each, label=EVIL) for each in profile.values))
    plan = plan_from_decisions(profile, {profile.activations[0].id: "swap"})
    profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    return tmp_path / "profile.json", tmp_path / "plan.json"


@pytest.mark.parametrize(
    "command",
    [
        ("show", "{profile}"),
        ("show", "{plan}", "--profile", "{profile}"),
        ("show", "{plan}", "--profile", "{profile}", "--json"),
        ("plan", "{profile}", "--budget", "min"),
        ("plan", "{profile}", "--budget", "1"),
        ("simulate", "{profile}", "{plan}"),
        ("show", "{profile}" + EVIL.replace("\x00", "").replace("/", "")),
    ],
)
def test_no_command_steers_the_terminal(
    command: tuple[str, ...], files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    profile, plan = files
    main([part.replace("{profile}", str(profile)).replace("{plan}", str(plan)) for part in command])
    told = capfd.readouterr()
    assert told.out + told.err
    assert is_harmless(told.out), told.out
    assert is_harmless(told.err), told.err
    if "--json" not in command and told.out:
        assert "owned" not in told.out or "\\x1b]0;owned" in told.out
