"""Runs the snippets of one page, one after the other.

Reads `[[kind, text], ...]` as JSON from standard input. Python blocks share their names; one that defines `make` is
also saved as `my_model.py`. Console lines are commands of Pooch. Each line of the output names the CPU seconds so far.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path


def run_python(code: str, names: dict[str, object]) -> None:
    if "def make(" in code:
        Path("my_model.py").write_text(code)
    exec(compile(code, "snippet", "exec"), names)


def run_command(line: str) -> None:
    from pooch_planner.cli import main

    program, *arguments = shlex.split(line, comments=True)
    assert program == "pooch", line
    if arguments[0] == "exec":  # takes over the process
        command = [sys.executable, "-m", "pooch_planner", *arguments]
        code = subprocess.run(command, stderr=subprocess.STDOUT, check=False).returncode
    else:
        code = main(arguments)
    assert code == 0, f"{line}: exit code {code}"


def main() -> None:
    names: dict[str, object] = {"__name__": "snippet"}
    for kind, text in json.load(sys.stdin):
        if kind == "python":
            run_python(text, names)
        else:
            run_command(text)
        sys.stdout.write(f"ran: {text.strip().splitlines()[0]} ({sum(os.times()[:4]):.1f} s)\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
