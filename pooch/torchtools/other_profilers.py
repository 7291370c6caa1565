"""Makes way for a profiler of the user's: PyTorch runs one session at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NAME = "_prepare_profiler"


@contextmanager
def told_of_profilers(begins: Callable[[], None]) -> Iterator[None]:
    """Context manager that calls `begins` before the program starts a profiler inside, in its thread.

    Not within a backward pass, where no session can be ended, since the engine restores the thread's state afterwards.
    """
    place: Any = torch.autograd.profiler
    original = getattr(place, _NAME)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            begins()
        return original(*args, **kwargs)

    setattr(place, _NAME, prepare)
    try:
        yield
    finally:
        if getattr(place, _NAME) is prepare:  # else it was wrapped since, and passes calls on
            setattr(place, _NAME, original)
