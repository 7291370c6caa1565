"""A stand-in for an optimizer that has only some of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .diversion import Step

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters of one group that are stepped together."""

    group_index: int
    parameters: list[torch.Tensor]


class Shadow:
    """Shares everything with an optimizer, its state above all, but for the parameters in its groups.

    The groups of the optimizer itself are never touched: whoever looks at it in the middle of a step, or after an
    exception at whatever point, sees all parameters.

    Args:
        optimizer: the optimizer.
        all_groups: whether groups without a parameter in the slice are there as well, empty. An optimizer may count on
            the place of a group.
    """

    def __init__(self, optimizer: Optimizer, all_groups: bool) -> None:
        self._optimizer, self._all_groups = optimizer, all_groups
        self._shadow: Optimizer = object.__new__(type(optimizer))
        self._attributes = dict(vars(optimizer))
        vars(self._shadow).update(self._attributes)

    def step(self, plain: Step, parts: Sequence[Part]) -> list[str]:
        """Step some parameters.

        Args:
            plain: the step of the optimizer's class.
            parts: the parameters, at most one part of each group.

        Returns:
            The names of attributes and entries of groups that the step has set.
        """
        groups = self._optimizer.param_groups
        shown = {part.group_index: {**groups[part.group_index], "params": part.parameters} for part in parts}
        if self._all_groups:
            shown = {index: shown.get(index) or {**group, "params": []} for index, group in enumerate(groups)}
        vars(self._shadow)["param_groups"] = list(shown.values())
        try:
            plain(self._shadow)
        finally:
            changed = self._write_back(shown)
        return changed

    def _write_back(self, shown: dict[int, dict[str, Any]]) -> list[str]:
        """Give the optimizer what its step has set, which is the shadow's by now."""
        changed = _news(vars(self._shadow), self._attributes, "param_groups")
        self._attributes.update(changed)
        vars(self._optimizer).update(changed)
        names = list(changed)
        for index, group in shown.items():
            entries = _news(group, self._optimizer.param_groups[index], "params")
            self._optimizer.param_groups[index].update(entries)
            names += entries
        return names


def _news(now: dict[str, Any], before: dict[str, Any], without: str) -> dict[str, Any]:
    return {name: value for name, value in now.items() if before.get(name, _ABSENT) is not value and name != without}
