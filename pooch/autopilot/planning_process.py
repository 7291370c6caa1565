"""The process that plans beside training: reads jobs, answers each, and ends with its input.

It imports no torch. Its priority is low, so the training step goes first.
"""

from __future__ import annotations

import os
import signal

from ..api.children import received, send
from ..errors import PoochError
from .jobs import WIRE, done

NICENESS = 10


def begin_aside() -> None:
    """Let the training step go first, and leave Ctrl-C to the training program, at whose end this one ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Do jobs until there are no more."""
    begin_aside()
    while True:
        job = received()["job"]
        try:
            send({"done": WIRE.plain(done(WIRE.made(job)))})
        except Exception as error:  # noqa: BLE001  # whatever it is, training goes on and tells
            send({"error": PoochError.__name__, "message": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
