"""The process that plans beside training: reads one job per line, answers each, and ends with its input.

It imports no torch. Its priority is low, so the training step goes first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ..api.children import send
from ..errors import FileFormatError
from .jobs import answer_saved, done, loaded

NICENESS = 10


def main() -> None:
    """Do jobs until there are no more."""
    os.nice(NICENESS)
    for line in sys.stdin:
        data = json.loads(line)
        folder = Path(data["folder"])
        try:
            send(answer_saved(done(loaded(data)), folder))
        except (FileFormatError, OSError):
            if folder.exists():
                raise
            return  # training has ended, and took the folder away


if __name__ == "__main__":
    main()
