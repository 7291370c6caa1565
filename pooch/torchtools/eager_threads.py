"""A thread in which nothing is compiled for a while, whatever others do at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Here(threading.local):
    depth = 0


_here = _Here()


@contextlib.contextmanager
def eager_in_this_thread() -> Iterator[None]:
    """Context manager within which compiled functions run as they were written, in the calling thread.

    :func:`torch.compiler.set_stance` does so for the whole process: other threads would compute other bits meanwhile,
    and of two that leave in another order than they entered, the later one would leave it so for good.
    """
    from torch._dynamo import eval_frame

    if not isinstance(eval_frame._stance, _StanceByThread):
        eval_frame._set_stance(_StanceByThread(eval_frame._stance))  # type: ignore[arg-type]
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


class _StanceByThread:
    """Dynamo's stance where another one is asked for in some threads. It stays, and elsewhere is what was there."""

    def __init__(self, elsewhere: Any) -> None:
        self._elsewhere = elsewhere

    @property
    def stance(self) -> str:
        return "force_eager" if _here.depth else self._elsewhere.stance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._elsewhere, name)
