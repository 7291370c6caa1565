"""Processes that a script starts through `multiprocessing`, as `torch.multiprocessing.spawn` does for its ranks.

The budget is held in each of them. A process that is spawned gets what its `Process` object refers to, and among that
what begins to hold the budget there. A forked one goes on with what its parent has. Workers that load data are left
alone, as they train nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..torchtools.stand_ins import Place
from .first_import import when_imported
from .governing import Governing

if TYPE_CHECKING:
    from .governed_process import GovernedProcess

_DATA_LOADING = "torch.utils.data."
_ATTRIBUTE = "_pooch_governing"
_ROOT = str(Path(__file__).resolve().parents[2])


def govern_started_processes(process: GovernedProcess) -> None:
    """Hold the budget in each process that this one starts from now on as well.

    Args:
        process: This one. It is kept alive as long as Python runs.
    """
    inherited = _Inherited(process.governing)

    def starting(original: Any) -> Any:
        def start(started: BaseProcess) -> None:
            if _loads_data(started):
                original(started)
                return
            vars(started)[_ATTRIBUTE] = inherited
            process.started_processes += 1
            with _importable():
                original(started)

        return start

    Place(BaseProcess, "start", starting).put()
    _AFTER_FORK.append(process)
    util.register_after_fork(process, _goes_on_in_fork)


_AFTER_FORK: list[GovernedProcess] = []  # `multiprocessing` does not keep them alive


class _Inherited:
    """What a spawned process reads before it runs anything of its own but the script's imports."""

    def __init__(self, governing: Governing) -> None:
        self._governing = governing

    def __reduce__(self) -> tuple[Any, ...]:
        return begin_in_spawned, (self._governing,)


def begin_in_spawned(governing: Governing) -> _Inherited:
    """Begin to hold the budget in this process, once it imports PyTorch: many processes do other work."""
    when_imported("torch", lambda: _begin(governing))
    return _Inherited(governing)


def _begin(governing: Governing) -> None:
    from .governed_process import GovernedProcess

    process = GovernedProcess(governing, is_started_by_script=True)
    process.start()
    govern_started_processes(process)
    _conclude_at_end(process)


@contextmanager
def _importable() -> Iterator[None]:
    """Have a spawned process find this package by our `sys.path`, though `python -m` may have found it where it ran."""
    if _ROOT in map(os.path.realpath, sys.path):
        yield
        return
    sys.path.append(_ROOT)
    try:
        yield
    finally:
        sys.path.remove(_ROOT)


def _goes_on_in_fork(process: GovernedProcess) -> None:
    """In a process of `multiprocessing` before it runs what it is for: what was to be done at its end was forgotten."""
    started = multiprocessing.current_process()
    if _ATTRIBUTE in vars(started) and process.is_here():
        _conclude_at_end(process)


def _conclude_at_end(process: GovernedProcess) -> None:
    util.Finalize(None, process.conclude, exitpriority=-1)  # `atexit` does nothing in a forked process


def _loads_data(process: BaseProcess) -> bool:
    return str(getattr(vars(process).get("_target"), "__module__", "")).startswith(_DATA_LOADING)
