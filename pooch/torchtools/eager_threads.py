"""A thread in which nothing is compiled for a while, whatever others do at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Here(threading.local):
    depth = 0


_here = _Here()
_lock = threading.Lock()
_threads = 0  # that are within


@contextlib.contextmanager
def eager_in_this_thread() -> Iterator[None]:
    """Context manager within which compiled functions run as they were written, in the calling thread.

    :func:`torch.compiler.set_stance` does so for the whole process: other threads would compute other bits meanwhile,
    and of two that leave in another order than they entered, the later one would leave it so for good.
    """
    from torch._dynamo import eval_frame

    global _threads
    with _lock:
        if not isinstance(eval_frame._stance, _StanceByThread):
            eval_frame._set_stance(_StanceByThread(eval_frame._stance))  # type: ignore[arg-type]
        _threads += 1
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        with _lock:
            _threads -= 1
            if not _threads and isinstance(eval_frame._stance, _StanceByThread):
                eval_frame._set_stance(eval_frame._stance.elsewhere)


class _StanceByThread:
    """Dynamo's stance while another one is asked for in some threads.

    Args:
        elsewhere: The stance in others. Also an attribute.
    """

    def __init__(self, elsewhere: Any) -> None:
        self.elsewhere = elsewhere

    @property
    def stance(self) -> str:
        return "force_eager" if _here.depth else self.elsewhere.stance

    def __getattr__(self, name: str) -> Any:
        return getattr(self.elsewhere, name)
