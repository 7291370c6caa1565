"""What a file holds is shown, and never obeyed by the terminal."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pooch.api.manual import plan_from_decisions
from pooch.cli import main
from pooch.cli.output import ProgressLine, progress_shown
from pooch.cli.phases import Phases
from pooch.ground.visible import visible
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


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def after(self, seconds: float) -> Clock:
        self.now_s += seconds
        return self


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_piped_progress_is_a_line_for_each_phase_at_its_end(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = ProgressLine(Phases({}, clock), is_terminal=False)
    for seconds, text in (
        (0, "building"),
        (0.7, "plain step 1 of 3"),
        (1, "plain step 2 of 3"),
        (1, "plain step 3 of 3"),
        (1.3, "planning: trying simple rules (5%)"),
        (12, "planning: solving the integer program, round 1 (37%)"),
        (7, "planning: planned (100%)"),
        (26, "timing step 1 of 3"),
    ):
        clock.after(seconds)
        progress(text)
    clock.after(4)
    progress.end()
    assert capsys.readouterr().err.splitlines() == [
        "  [  4 s] plain steps: 3.3 s",
        "  [ 16 s] planning (37%)",
        "  [ 49 s] planning: 45.0 s",
        "  [ 53 s] timing steps: 4.0 s",
    ]


def test_a_rewritten_line_tells_what_is_left(clock: Clock) -> None:
    phases = Phases({"planning": 30.0}, clock)
    assert phases.line() == "starting  0 s"
    phases.update("plain step 2 of 3", None)
    clock.after(1)
    assert phases.line() == "plain step 2 of 3 (33%)  1 s"
    clock.after(3)
    assert phases.line() == "plain step 2 of 3 (33%)  4 s, about 8 s left"
    phases.update("planning: improving the plan (70%)", None)
    clock.after(10)
    assert phases.line() == "planning: improving the plan (70%)  14 s, at most 20 s left"
    phases.update("policy ilp", 0.25)
    clock.after(50)
    assert phases.line() == "policy ilp (25%)  64 s, about 2:30 min left"
    phases.update("building", None)
    clock.after(50)
    assert phases.line() == "building  1:54 min"


def test_a_terminal_shows_a_line_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", shown)
    with progress_shown(planning=5.0) as progress:
        progress("planning: [red]" + EVIL)
    assert "planning: [red]name\\x1b" in shown.getvalue()
