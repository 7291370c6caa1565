"""Importing a library without a trace of who was running."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def imported_apart(name: str) -> Any:
    """Import a module in a thread of its own, and return it.

    PuLP keeps the exceptions of solvers that are not installed, and an exception keeps every frame that was running: a
    user's function that planned for the first time would never let go of its model.

    Args:
        name: of the module.

    Raises:
        ImportError: it cannot be imported.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="pooch-import") as pool:
        return pool.submit(importlib.import_module, name).result()
