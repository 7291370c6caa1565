"""A child process for tests: ends in the way that its job names."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from pooch.api.children import received, send


def main() -> None:
    job = received()
    match job["how"]:
        case "an error of its own":
            raise KeyError("nothing of this name")
        case "killed, with last words":
            sys.stderr.write("one line\nthe last \x1b[31mwords\n\n")
            sys.stderr.flush()
            os._exit(3)
        case "killed":
            os._exit(4)
        case "with a warning":
            warnings.warn("mind this", stacklevel=1)
            os.write(2, b"and that, without an end")
            send({"done": True})
        case "an answer that nobody reads":
            Path(job["mark"]).touch()
            while True:
                send({"progress": ["on"]})


if __name__ == "__main__":
    main()
