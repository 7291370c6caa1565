"""Optional rooms: packages that add policies, workloads, commands and file types to Pooch, which never imports them.

What a room adds is data in its `plugin.py`: names, and where the object behind each name is. The object is imported
when somebody asks for it, so a room costs nothing until then.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

ROOMS = ("published", "onnx")

Kind = Literal["policies", "workloads", "commands", "workload_files", "exporters"]


@dataclass(frozen=True, slots=True)
class Provided:
    """Something that a room adds under a name.

    Attributes:
        module: where it is, as a full module name.
        attribute: what it is called there.
        summary: one line for help texts.
    """

    module: str
    attribute: str
    summary: str = ""

    def load(self) -> Any:
        """Import the object."""
        return getattr(importlib.import_module(self.module), self.attribute)


@dataclass(frozen=True, slots=True)
class Plugin:
    """What one room adds, by kind and name.

    Attributes:
        policies: functions from a planning request to an outcome.
        workloads: {any name: a tuple of built-in workloads}.
        commands: click commands.
        workload_files: {file suffix: function from a path to the builder of a workload}.
        exporters: {file suffix: what writes a trained model to such a file}.
    """

    policies: Mapping[str, Provided] = field(default_factory=dict)
    workloads: Mapping[str, Provided] = field(default_factory=dict)
    commands: Mapping[str, Provided] = field(default_factory=dict)
    workload_files: Mapping[str, Provided] = field(default_factory=dict)
    exporters: Mapping[str, Provided] = field(default_factory=dict)


@cache
def provided(kind: Kind) -> dict[str, Provided]:
    """Everything of a kind that the rooms add, by name."""
    rooms = (importlib.import_module(f".{room}.plugin", __package__).PLUGIN for room in ROOMS)
    return {name: each for room in rooms for name, each in getattr(room, kind).items()}
