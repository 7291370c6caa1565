"""In a checkout, the name that an installed package is imported by: `pooch_planner` is `pooch`, module by module.

It is not part of the wheel, which holds the package itself under this name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _SameModules(MetaPathFinder, Loader):
    """Finds `pooch.NAME` where `pooch_planner.NAME` is imported, so that no class is there twice."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> object:
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"pooch{spec.name.removeprefix(__name__)}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back, which importing has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


if __name__ == "__main__":  # python -m pooch_planner
    sys.exit(importlib.import_module("pooch.cli").main())
sys.meta_path.insert(0, _SameModules())
sys.modules[__name__] = importlib.import_module("pooch")
