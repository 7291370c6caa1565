"""The process that plans beside training: reads one job per line, answers each, and ends with its input.

It imports no torch. Its priority is low, so the training step goes first.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
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
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), name="pooch-parent", daemon=True).start()
    while True:
        data = json.loads(jobs.get())
        try:
            answer_saved(done(loaded(data)), Path(data["folder"]))
            send({"done": True})
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on and tells
            send({"failed": f"{type(error).__name__}: {error}"})


def _read(jobs: queue.SimpleQueue[str]) -> None:
    """Pass on jobs. With the input, which the training program holds open, the process ends, whatever it is doing."""
    with os.fdopen(os.dup(sys.stdin.fileno())) as lines:  # not `sys.stdin`, whose lock the interpreter needs at its end
        for line in lines:
            jobs.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
