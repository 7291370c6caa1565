"""Processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment, with the source tree before all other places that Python looks at."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **extra}


def is_gone(process: psutil.Process) -> bool:
    """Whether it runs no more; nobody may have asked for the exit status of one whose parent was killed."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
