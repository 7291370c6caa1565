"""Packages that add policies, workloads, commands, file types and views, without what is below importing them.

`published` and `onnx` are optional. `report` adds the views of profiles, plans and timelines: what a notebook shows of
them, and what their methods draw. Each package lists in its `plugin.py` the names that it adds and where their objects
are. An object is imported when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

_PACKAGE = __package__.rpartition(".")[0]  # `pooch` in a checkout, `pooch_planner` in a wheel
ROOMS = ("published", "onnx", "report")

Kind = Literal["policies", "workloads", "commands", "workload_files", "exporters", "views"]


@dataclass(frozen=True, slots=True)
class Provided:
    """An object that a package adds under a name.

    Attributes:
        module: full name of the module.
        attribute: name of the object in the module.
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
    """What one package adds, by kind and name.

    Attributes:
        policies: functions from a planning request to an outcome, by name.
        workloads: tuples of built-in workloads, by any name.
        commands: click commands, by name.
        workload_files: functions from a path to the builder of a workload, by file suffix.
        exporters: functions that write a trained model to a file, by file suffix.
        views: functions that show a profile, plan or timeline in some way, such as "plan_html".
    """

    policies: Mapping[str, Provided] = field(default_factory=dict)
    workloads: Mapping[str, Provided] = field(default_factory=dict)
    commands: Mapping[str, Provided] = field(default_factory=dict)
    workload_files: Mapping[str, Provided] = field(default_factory=dict)
    exporters: Mapping[str, Provided] = field(default_factory=dict)
    views: Mapping[str, Provided] = field(default_factory=dict)


@cache
def provided(kind: Kind) -> dict[str, Provided]:
    """Everything of a kind that the packages add, by name."""
    rooms = (importlib.import_module(f"{_PACKAGE}.{room}.plugin").PLUGIN for room in ROOMS)
    return {name: each for room in rooms for name, each in getattr(room, kind).items()}


def view(name: str) -> Any:
    """The function that shows something in some way, see `Plugin.views`."""
    return provided("views")[name].load()
