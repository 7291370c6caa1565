"""What is done once a module is imported that may never be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def when_imported(name: str, done: Callable[[], object]) -> None:
    """Call a function once a module is there: now, or when it has been imported for the first time.

    Args:
        name: Of a module of its own, in no package.
        done: The function.
    """
    if name in sys.modules:
        done()
    else:
        sys.meta_path.insert(0, _Finder(name, done))


class _Finder:
    def __init__(self, name: str, done: Callable[[], object]) -> None:
        self._name, self._done = name, done

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module as Python does, once, and have the function called after its own code."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        loader = None if spec is None else spec.loader
        if loader is None:
            return spec
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._done()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
