"""Runs cases that may end the process in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from tests.children import ROOT, child_environment
from tests.hostile.harness import WAYS, Outcome

LIMIT_S = 240  # a net for what hangs
_Found = dict[tuple[str, str], Outcome]


def outcomes_apart(names: Sequence[str], ways: Sequence[str] = WAYS) -> _Found:
    """Run cases in a process, and in a further one what is left when a case has ended it.

    Returns:
        The outcome of each case and way.
    """
    found: _Found = {}
    wanted = [(name, way) for name in names for way in ways]
    while left := [pair for pair in wanted if pair not in found]:
        command = [sys.executable, "-m", "tests.hostile.child", *("=".join(pair) for pair in left)]
        child = subprocess.run(
            command,
            cwd=ROOT,
            env=child_environment(OMP_NUM_THREADS="1"),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        for line in child.stdout.splitlines():
            told = json.loads(line)
            pair = told.pop("case"), told.pop("way")
            found[pair] = Outcome(**told)
        unfinished = [pair for pair in left if pair not in found]
        if child.returncode != 0:
            found[(unfinished or left[-1:])[0]] = _crash(child)
        elif unfinished:
            raise RuntimeError(f"the process ended before {unfinished[0]}: {child.stderr}")
    return found


def _crash(child: subprocess.CompletedProcess[str]) -> Outcome:
    last = (child.stderr.strip().splitlines() or [""])[-1]
    return Outcome("crash", f"exit code {child.returncode}: {last[:200]}")
