"""Notices that some module of the process was given a parameter or a part."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook


class ModuleChanges:
    """Counts what modules are given, wherever in the process. So it is known at no cost that there was nothing.

    What writes to the dictionaries of a module itself is not seen, unless it is a new module, which is given its own
    parameters.

    Attributes:
        count: Number of parameters and parts that were given so far.
    """

    def __init__(self) -> None:
        self.count = 0
        counted = self._given
        self._hooks = [
            register_module_parameter_registration_hook(counted),
            register_module_module_registration_hook(counted),
        ]

    def _given(self, *_: Any) -> None:
        self.count += 1

    def stop(self) -> None:
        """Count no longer."""
        for hook in self._hooks:
            hook.remove()
