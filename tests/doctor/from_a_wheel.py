"""`pooch doctor` as it is installed: from the wheel, in an environment of its own, and run in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.children import ROOT
from tests.wheels import built_wheel, pip

LIMIT_S = 180  # that are promised


@dataclass(frozen=True)
class Told:
    """What the command left.

    Attributes:
        code: its exit code.
        out: what it wrote.
        error: what it wrote to standard error.
        record: the file to be attached.
    """

    code: int
    out: str
    error: str
    record: dict[str, Any]


class Installed:
    """The wheel, installed.

    Args:
        folder: where.
        folders: where the wheel of this checkout is built.
    """

    def __init__(self, folder: Path, folders: pytest.TempPathFactory) -> None:
        self._folder = folder
        venv.create(folder / "venv")
        pip(folder / "venv/bin/python", "install", "--no-deps", str(built_wheel(folders)))

    def doctor(self, device: str, **variables: str) -> Told:
        """Run the command in an empty folder, of which it leaves one file.

        Args:
            device: what is examined.
            variables: of its environment.
        """
        folder = self._folder / "-".join(("empty", *variables))
        folder.mkdir()
        # What it needs besides is taken from this environment; its own checkout of Pooch is not on that path.
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [*(path for path in inherited if path and Path(path) != ROOT), sysconfig.get_paths()["purelib"]]
        done = subprocess.run(
            [str(self._folder / "venv/bin/pooch"), "doctor", "--device", device],
            capture_output=True, text=True, timeout=600, check=False, cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        )  # fmt: skip
        assert [path.name for path in folder.iterdir()] == ["pooch-doctor.json"], done.stdout + done.stderr
        return Told(done.returncode, done.stdout, done.stderr, json.loads((folder / "pooch-doctor.json").read_text()))


def assert_nothing_is_wrong(told: Told, device: str) -> None:
    """All checks were run, those of ten models among them, in the time that is promised.

    Args:
        told: what the command left.
        device: what was examined.
    """
    assert told.code == 0, told.out + told.error
    assert told.out.startswith(f"Nothing is wrong on {device}"), told.out
    findings = told.record["findings"]
    assert sum(each["check"].startswith("training: ") for each in findings) == 10
    assert {each["status"] for each in findings} <= {"passed", "told"}
    assert told.record["elapsed_s"] < LIMIT_S
