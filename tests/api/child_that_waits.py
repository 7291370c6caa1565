"""A child process for tests: tells its process number, then waits for what the job names."""

from __future__ import annotations

import os
import signal
import time

from pooch.api.children import received, send


def main() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job = received()
    try:
        send({"progress": [os.getpid()]})
        time.sleep(600)
    except KeyboardInterrupt:
        if job["answers"]:
            send({"done": True})


if __name__ == "__main__":
    main()
