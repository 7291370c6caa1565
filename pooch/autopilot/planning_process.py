"""The process that plans beside training: reads one job per line, answers each, and ends with its input.

It imports no torch. Its priority is low, so the training step goes first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from ..api.children import send
from .jobs import answer_saved, done, loaded

NICENESS = 10


def begin_aside() -> None:
    """Let the training step go first, and leave Ctrl-C to the training program, at whose end this one ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Do jobs until there are no more."""
    begin_aside()
    for line in sys.stdin:
        data = json.loads(line)
        folder = Path(data["folder"])
        try:
            answer_saved(done(loaded(data)), folder)
            send({"done": True})
        except OSError:
            if folder.exists():
                raise
            return  # training has ended, and took the folder away


if __name__ == "__main__":
    main()
