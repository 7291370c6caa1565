"""Run the script that README.md shows under `pooch exec`, and write what it printed beside it.

    python -m benchmarks.readme_run

Needs a machine that does nothing else, so that a plan is ready before the script ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pooch.ir.files import replace_file

ROOT = Path(__file__).parent.parent
COMMAND = "$ pooch exec --budget 60% train.py\n"
MOST_OF_SUMMARY = 2  # lines; README.md is short


def main() -> None:
    page = ROOT / "README.md"
    text = page.read_text()
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        lines = printed_in(folder)
    before, _, after = text.partition(COMMAND)
    replace_file(page, f"{before}{COMMAND}{''.join(shown(lines))}{after[after.index('```') :]}".encode())


def printed_in(folder: str) -> list[str]:
    """What `pooch exec` and the script print, in the order in which they do."""
    finished = subprocess.run(
        [sys.executable, "-m", "pooch", *COMMAND.split()[2:]],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    return finished.stdout.splitlines(keepends=True)


def shown(lines: list[str]) -> list[str]:
    """The budget as it is in the end, the plans, what the script prints, and the beginning of the summary."""
    budgets = [line for line in lines if line.startswith("pooch: the budget is ")]
    end = next(place for place, line in enumerate(lines) if not line.startswith("pooch: "))  # the script's own line
    assert any("planned" in line for line in lines[:end]), (
        "no plan was ready in time: run this again on an idle machine"
    )
    training = [line for line in lines[: end + 1] if line not in budgets]
    return [*budgets[-1:], *training, *lines[end + 1 : end + 1 + MOST_OF_SUMMARY]]


if __name__ == "__main__":
    main()
