"""Running the command in this process, with its output caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import pooch
from pooch.cli import main
from pooch.ir import Plan, Profile
from tests.toys import FAST_LINK, blocks


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    error: str

    @property
    def error_line(self) -> str:
        """The one line that tells the error; only indented lines of progress may stand before it."""
        *progress, line = self.error.splitlines()
        assert all(text.startswith("  ") for text in progress), self.error
        assert line.startswith("pooch: ")
        assert "Traceback" not in self.error
        return line


Command = Callable[..., Outcome]


@pytest.fixture
def pooch_command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Outcome:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def profile() -> Profile:
    return blocks(4, link=FAST_LINK)


@pytest.fixture
def profile_path(profile: Profile, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    profile.save(path)
    return path


@pytest.fixture
def plan(profile: Profile) -> Plan:
    return pooch.plan(profile, "60%")


@pytest.fixture
def plan_path(plan: Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    plan.save(path)
    return path
