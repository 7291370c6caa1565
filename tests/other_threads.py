"""Threads beside the one that trains."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from pooch.torchtools.threads import OwnThread


@contextlib.contextmanager
def another_thread(*, may_train: bool) -> Iterator[None]:
    """Context manager in which another thread is there.

    Args:
        may_train: Whether it has trained, as the worker of a pool has that is given a model at any moment. Else it
            only waits, as the monitor of a progress bar does.
    """
    is_over, is_there = threading.Event(), threading.Event()

    def run() -> None:
        own = OwnThread() if may_train else None
        is_there.set()
        is_over.wait(120)
        del own

    thread = threading.Thread(target=run)
    thread.start()
    is_there.wait(120)
    try:
        yield
    finally:
        is_over.set()
        thread.join()
