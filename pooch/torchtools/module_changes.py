"""Notices that some module of the process was given a parameter or a part."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle

from .endings import end_with


class _Given:
    """Counts what modules were given.

    Attributes:
        count: Number of parameters and parts so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def note(self, *_: Any) -> None:
        """Count one more. What the module is given stays as it is."""
        self.count += 1


class ModuleChanges:
    """Counts what modules are given, wherever in the process, as long as this lives or until `stop`.

    So it is known at no cost that there was nothing. What writes to the dictionaries of a module itself is not seen,
    unless that adds a new module, which was given its own parameters.

    Attributes:
        given: What counts them.
    """

    def __init__(self) -> None:
        self.given = _Given()
        note = self.given.note
        hooks = (register_module_parameter_registration_hook(note), register_module_module_registration_hook(note))
        self.stop = end_with(self, _remove, hooks)


def _remove(hooks: tuple[RemovableHandle, ...]) -> None:
    for hook in hooks:
        hook.remove()
