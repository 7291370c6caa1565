"""Processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def child_environment(**extra: str) -> dict[str, str]:
    """This process's environment, with the source tree before all other places that Python looks at."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **extra}
