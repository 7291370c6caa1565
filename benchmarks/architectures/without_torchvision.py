"""Stand-ins for torchvision, which packages of networks import for pictures that nobody loads here.

A wheel of torchvision fits one build of torch alone. Where none fits, its modules are made up: their names are classes
that can be inherited from and compared with, and that nothing here calls.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

NAME = "torchvision"


class _Names(type):
    """The kind of a class that has every name, as an enumeration would."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _MadeUp(ModuleType):
    """A module in which every name is a class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Names(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _MadeUp(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def stand_in() -> None:
    """Make up torchvision in this process, unless it is installed."""
    if NAME not in sys.modules and importlib.util.find_spec(NAME) is None:
        sys.meta_path.append(_Finder())
