"""How a step runs can be read in five files, which docs/architecture.md names in reading order."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES = 1500


def test_five_short_files_tell_how_a_step_runs() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d\. `(pooch/[\w/]+\.py)`", page, re.MULTILINE)
    assert len(listed) == 5
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in listed}
    assert sum(lines.values()) <= MOST_LINES, f"{lines}: move what is a detail to a file of its own"
